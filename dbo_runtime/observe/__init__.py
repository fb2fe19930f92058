"""What happened: timelines and logs. The core reaches this only through `Instrument`."""
