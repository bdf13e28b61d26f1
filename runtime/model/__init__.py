"""Finds a model on the Hub or disk, reads its config, and builds it without memory."""
