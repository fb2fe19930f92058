"""Metrics, sampled timelines and traces of served steps."""
