"""Checks and prices plans on the unfolded graph, independently of any solver."""
