"""Checkpoints: matching their tensors to a model's names, and reading and writing shards."""
