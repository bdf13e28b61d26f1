"""Stacks of repeated blocks: each kind of block is traced and solved once, then copied."""
