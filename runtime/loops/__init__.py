"""Training loops of others around a split model: each file needs another package."""
