"""Queries of model code about its context: training, gradients, autocast, flags, numbers."""
