"""Modules and functions that are not traced, and stand for themselves."""
