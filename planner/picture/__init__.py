"""Draws plans as one self-contained HTML page, with one file per drawing."""
