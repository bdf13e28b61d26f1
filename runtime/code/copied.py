"""The prefix of attributes that splitting adds to a module."""

OWN = "_shardwright"
"""The prefix."""
