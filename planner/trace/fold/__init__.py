"""Tracing with one block of each kind in place of all."""
