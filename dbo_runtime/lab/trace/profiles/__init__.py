"""Profiles of torch's profilers as timelines of steps, with or without this package's ranges."""
