"""From a module to a graph of ATen calls, on meta: `trace.py` has the order of the steps."""
