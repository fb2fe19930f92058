"""Programs of ops: from an adapter's declaration to a proven schedule."""
