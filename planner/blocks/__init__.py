"""Stacks of like blocks: traced and solved once for each kind, then copied to all of them."""
