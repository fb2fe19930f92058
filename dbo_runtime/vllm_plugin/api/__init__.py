"""All vLLM names that depend on its version, and plain constants that need no vLLM."""
