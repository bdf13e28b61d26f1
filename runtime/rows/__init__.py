"""Sequences of which each rank has some rows."""
