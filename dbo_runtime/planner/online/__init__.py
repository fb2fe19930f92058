"""What serving plans steps with."""
