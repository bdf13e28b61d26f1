"""Logits whose classes stay split, and the loss of them."""
