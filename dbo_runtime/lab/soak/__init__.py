"""Random traffic on real engines, with split steps compared to unsplit ones."""
