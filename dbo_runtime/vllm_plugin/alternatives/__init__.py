"""Splitting without an adapter, and compiling ops one by one."""
