"""Profiles of torch's profilers, with or without this package's ranges, as timelines of steps."""
