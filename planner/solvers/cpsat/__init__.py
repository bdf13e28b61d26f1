"""OR-tools CP-SAT: an integer a part of a variable, tables as rows, costs of any size."""

from shardwright.planner.solvers.cpsat.minimise import as_text, solve

__all__ = ["as_text", "solve"]
