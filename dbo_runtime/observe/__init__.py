"""Timelines, their summaries and traces, counts, and the log."""
