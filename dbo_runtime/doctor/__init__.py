"""What speaks against overlap on this machine, in this environment, and what to do about it."""
