"""The solver for large problems: prices, messages, branch and bound, search by parts."""

from benchmarks.decompose.rounds import solve

__all__ = ["solve"]
