"""Dry runs: the model's own code runs a plan on meta; a failure forbids some splits."""
