"""What changes of a model after it was split: noticed, and refused by name."""
