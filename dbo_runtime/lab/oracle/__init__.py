"""The planner's oracle: it searches and simulates for each step."""
