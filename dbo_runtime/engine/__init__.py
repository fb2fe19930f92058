"""Plans of steps, and what runs them on a device."""
