"""Provenance of the integers that model code computes with."""
