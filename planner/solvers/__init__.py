"""Solvers: our own, and those of other packages in the entry-point group `shardwright.solvers`.

A solver is a function `solve(problem, component, caps, hint, seconds) -> Result`; see
`planner/solvers/problem.py`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from shardwright import plugins
from shardwright.errors import SolverError, UsageError
from shardwright.planner.solvers.problem import Solver

OWN = ("backtracking", "cpsat", "lp")
DEFAULT = "cpsat"


def names() -> list[str]:
    """Names of the solvers that are installed."""
    return sorted({*OWN, *plugins.names("solvers")})


def load(name: str) -> Solver:
    """The solver of that name.

    Raises:
        UsageError: there is none.
        PluginError: another package's does not load.
    """
    if name in OWN:
        return import_module(f"{__name__}.{name}").solve
    found = plugins.load("solvers", name)
    if found is None:
        raise UsageError(f"unknown solver '{name}'; installed: {', '.join(names())}")
    return found


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
