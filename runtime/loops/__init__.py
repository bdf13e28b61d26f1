"""Adapts training loops of other packages to split models; each file needs another package."""
