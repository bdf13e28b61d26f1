"""The search for a plan of a traced model: solve, prove, dry-run. `ladder.py` has the order."""
