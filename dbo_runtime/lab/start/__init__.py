"""Start vLLM from a command: its arguments and log, what it says when it fails, and Ctrl-C meanwhile."""
