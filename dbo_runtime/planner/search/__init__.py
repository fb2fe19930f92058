"""The search for an issue order, with a bound that can prove it optimal."""
