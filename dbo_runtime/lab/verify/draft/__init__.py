"""Drafts of adapters, written from what a model's own forward calls."""
