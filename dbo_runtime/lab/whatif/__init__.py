"""Predictions for other machines than this one: commands and reports."""
