"""Watch a schedule while it runs, for DBO_CHECK=races and for the verification of adapters."""
