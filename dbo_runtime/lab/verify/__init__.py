"""Adapters verified against the model's own forward."""
