"""The way from a traced model to a plan that was proven and tried: `ladder.py` has the order."""
