"""Redistribution of a tensor from one placement to another, and of its gradient back."""
