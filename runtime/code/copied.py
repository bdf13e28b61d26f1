"""The names of what splitting puts into a module."""

OWN = "_shardwright"
"""How they begin."""
