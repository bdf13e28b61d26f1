"""Quantized checkpoints: what is stored of a weight, and how its numbers are computed from it."""
