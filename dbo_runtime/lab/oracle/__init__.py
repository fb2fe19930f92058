"""What the program is held against: a planner that searches for each step, and rules for ranks that differ."""
