"""Solvers by name: our own, and plugins of the entry-point group `shardwright.solvers`.

A solver is a function `solve(problem, component, caps, hint, seconds) -> Result`; see
`planner/solvers/problem.py`.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from shardwright import plugins
from shardwright.errors import UsageError
from shardwright.planner.solvers.problem import Solver

OWN = ("backtracking", "cpsat")
DEFAULT = "cpsat"


def names() -> list[str]:
    """Return the names of the installed solvers."""
    return sorted({*OWN, *plugins.names("solvers")})


def current(name: str | None) -> str:
    """Return the name of the requested solver, or of the default."""
    if name == "lp":
        warnings.warn("solver 'lp' is gone: 'cpsat' is used", DeprecationWarning, stacklevel=2)
        return DEFAULT
    return name or DEFAULT


def load(name: str) -> Solver:
    """Return the solver of that name.

    Raises:
        UsageError: there is no such solver.
        PluginError: the solver of another package does not load.
    """
    if name in OWN:
        return import_module(f"{__name__}.{name}").solve
    found = plugins.load("solvers", name)
    if found is None:
        raise UsageError(f"unknown solver '{name}'; installed: {', '.join(names())}")
    return found
