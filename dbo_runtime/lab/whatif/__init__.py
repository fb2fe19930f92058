"""Predictions for machines that are not here: commands and reports."""
