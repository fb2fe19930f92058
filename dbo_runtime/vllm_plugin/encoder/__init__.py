"""The vision encoder: its forward, its program, and sequence lengths known on the host."""
