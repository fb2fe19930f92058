"""Timelines, their gaps, traces as they are written, counts, and the log."""
