"""Measure the costs of a served model's ops, and say what splitting will gain by them."""
