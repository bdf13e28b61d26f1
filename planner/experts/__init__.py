"""Finds mixtures of experts, and tests whether their tokens may travel between ranks."""
