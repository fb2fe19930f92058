"""Measuring what a served model's ops cost, and where the costs that steps are planned by come from."""
