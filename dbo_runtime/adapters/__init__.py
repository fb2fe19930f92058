"""Adapter contracts, the interfaces that adapters use to communicate, and the registry that finds adapters."""
