"""Readers of traces and of torch profiles, with summaries and drawings of steps."""
