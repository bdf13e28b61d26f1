"""Proves a plan from a file again for its model, whoever wrote the plan."""
