"""Tracing a module on meta into a graph of ATen calls; `trace.py` lists the steps in order."""
