"""Watch a schedule while it runs: what DBO_CHECK=races does, and what the verification of adapters asks of each op."""
