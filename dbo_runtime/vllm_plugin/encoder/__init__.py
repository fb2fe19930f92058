"""The vision encoder: its forward, its program, and sequence lengths that the host knows."""
