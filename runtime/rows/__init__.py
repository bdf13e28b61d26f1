"""Sequences that are sharded by rows over `cp`."""
