"""Modules and functions that are not traced and become one op each."""
