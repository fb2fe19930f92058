"""Simulate a serving cluster: turn the planner's step times into requests per second at a service level."""
