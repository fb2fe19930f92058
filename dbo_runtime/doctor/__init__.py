"""Report what prevents overlap on this machine, in this environment, and what to do about it."""
