"""Measure the costs of a served model's ops, and give them to the planner."""
