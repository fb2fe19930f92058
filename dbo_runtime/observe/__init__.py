"""Timelines, trace files, counts, and the log."""
