"""Plans of steps, and the executors that run them on a device."""
