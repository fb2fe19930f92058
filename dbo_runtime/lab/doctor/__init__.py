"""Report what prevents overlap on this machine and in this environment, and what to do about it."""
