"""Verify adapters against the model's own forward."""
