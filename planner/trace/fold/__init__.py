"""Tracing with one block of each kind instead of all blocks."""
