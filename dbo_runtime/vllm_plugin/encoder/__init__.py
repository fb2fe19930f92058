"""The vision encoder's forward, and sequence lengths that the host knows."""
