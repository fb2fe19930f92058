"""A program of ops, from its declaration to a proven schedule."""
