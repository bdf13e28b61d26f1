"""Reads the code and attributes of modules, and puts local integers into both."""
