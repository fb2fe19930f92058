"""Decide from the costs of ops when splitting a step is faster, and in which order to issue the ops."""
