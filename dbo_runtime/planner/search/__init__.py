"""The search for an issue order, with a proof."""
