"""Queries of model code about tensor data, which a trace lacks: numbers, rows, branches, loops."""
