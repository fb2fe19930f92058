"""The planner's oracle. It searches and simulates for each step."""
