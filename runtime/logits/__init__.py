"""Logits that stay sharded by class, and their loss."""
