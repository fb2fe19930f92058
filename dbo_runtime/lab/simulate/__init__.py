"""A cluster that serves: step times of the planner turned into requests a second at a service level."""
