"""Solvers, found through the entry-point group `shardwright.solvers`.

A solver is a function `solve(problem, component, caps, hint, seconds) -> Result`; see
`planner/solvers/problem.py`. A package of anyone's can add one.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from shardwright.errors import SolverError, UsageError
from shardwright.planner.solvers.problem import Solver

GROUP = "shardwright.solvers"
OWN = ("backtracking", "cpsat", "lp")
DEFAULT = "lp"


def names() -> list[str]:
    """Names of the solvers that are installed."""
    return sorted({e.name for e in entry_points(group=GROUP)} | {*OWN})


def load(name: str) -> Solver:
    """The solver of that name.

    Raises:
        UsageError: there is none.
    """
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return entry.load()
    if name in OWN:
        return import_module(f"{__name__}.{name}").solve
    raise UsageError(f"unknown solver '{name}'; installed: {', '.join(names())}")


def needs_ortools(name: str) -> SolverError:
    """What to raise where OR-tools is missing."""
    return SolverError(
        f"solver '{name}' needs OR-tools: pip install ortools, or use --solver backtracking"
    )


def backup() -> tuple[Solver | None, str]:
    """The default solver, and a note where backtracking has to do."""
    if find_spec("ortools") is not None:
        return load(DEFAULT), ""
    return None, "OR-tools is not installed: planned with the backtracking solver"
