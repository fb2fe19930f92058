"""Readers of traces, and of profiles of torch's profiler: what they say of a step, summed and drawn."""
