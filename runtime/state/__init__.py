"""Full tensors and optimizer state from local ones, and back."""
