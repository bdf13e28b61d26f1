"""Solvers, found through the entry-point group `shardwright.solvers`.

A solver is a function `solve(problem, component, caps, hint, seconds) -> Result`; see
`planner/problem.py`. A package of anyone's can add one.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

from shardwright.errors import UsageError
from shardwright.planner.problem import Solver

GROUP = "shardwright.solvers"


def names() -> list[str]:
    """Names of the solvers that are installed."""
    return sorted({e.name for e in entry_points(group=GROUP)} | {"cpsat", "backtracking"})


def load(name: str) -> Solver:
    """The solver of that name.

    Raises:
        UsageError: there is none.
    """
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return entry.load()
    if name == "cpsat":
        from shardwright.planner.solvers.cpsat import solve
    elif name == "backtracking":
        from shardwright.planner.solvers.backtracking import solve
    else:
        raise UsageError(f"unknown solver '{name}'; installed: {', '.join(names())}")
    return solve


def backup() -> tuple[Solver | None, str]:
    """The solver for what the scout cannot prove, and a note where there is none.

    The scout is the backtracking solver: exact elimination proves the networks of dense models in
    tenths of a second, where CP-SAT did not within a minute (6 layers of a dense decoder).
    """
    if find_spec("ortools") is not None:
        return load("cpsat"), ""
    return None, "OR-tools is not installed: planned with the backtracking solver"
