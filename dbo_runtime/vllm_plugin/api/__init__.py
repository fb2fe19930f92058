"""Every name of vLLM's that depends on its version, and plain constants that need no vLLM."""
