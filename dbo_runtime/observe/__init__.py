"""Timelines and their gaps, trace files, counts, and the log."""
