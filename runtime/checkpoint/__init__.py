"""Checkpoints: which tensors there are, what the model calls them, reading and writing parts."""
