"""The `cpsat` solver: OR-tools CP-SAT, with an integer for each part and costs of any size."""

from shardwright.planner.solvers.cpsat.minimise import as_text, solve

__all__ = ["as_text", "solve"]
