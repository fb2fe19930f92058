"""Drafts of adapters, written from the calls of a model's own forward."""
