"""Forward contexts and attention metadata of micro-batches."""
