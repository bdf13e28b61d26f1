"""Plans of small models for tests: for least memory, so that they are split.

Least time, the default, leaves models whole that are too small to be worth a collective. CP-SAT
would only prove again what backtracking finds, in a quarter of the time of such a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.graph import Graph
from shardwright.planner.report import tables
from shardwright.planner.report.report import report
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trace_runs import trace_runs

proven = partial(shardwright.plan, objective="memory")
"""As the command line plans: also for benchmarks, and where a test is about solvers."""
plan = partial(proven, solver="backtracking")


class Once:
    """Plans that the tests of a file share, made before its first test: ranks only read them.

    Args:
        make: Returns a plan.
        cases: Arguments of each plan; by default one plan without arguments.
    """

    def __init__(self, make: Callable[..., Plan], *cases: int) -> None:
        self.make, self.cases = make, [(case,) for case in cases] or [()]
        self.plans: dict[tuple[int, ...], Plan] = {}

    def __call__(self, *case: int) -> Plan:
        return self.plans[case]

    def prepare(self) -> None:
        """Make the plans that are not there yet."""
        for case in self.cases:
            if case not in self.plans:
                self.plans[case] = self.make(*case)


def as_text(plan: Plan) -> str:
    """Return what `shardwright show` prints where there is no terminal."""
    return tables.plain(report(plan))


ASKED = SolverOptions(objective="memory")


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], more: Sequence[Run] = ()
) -> Graph:
    """Return the graph of `module(*args, **kwargs)`, and then of `more` runs of it."""
    return trace_runs(module, [Run("", args, kwargs), *more])
