"""Random traffic on real engines, split against unsplit."""
