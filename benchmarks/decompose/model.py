"""From a problem to a network, and from an assignment of the network back.

Costs of a problem are whole numbers of any size, those of a network floats. So what all rows of a
factor cost is subtracted before, in whole numbers. What is left and is below 2^52 is exact, and
what is more stays more.

A factor of more than two variables, and one that a cap counts, becomes a variable of its own whose
values are its rows, tied to the variables that it ranges over. A cap is then a limit of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.decompose.grid import FORBIDDEN, Grid
from benchmarks.decompose.limits import LimitedProblem, Limits
from benchmarks.decompose.network import Array, Network, Spans
from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Factor, Problem

EXACT = 2**52
"""Floats tell whole numbers apart up to twice this: what messages move fits besides."""


@dataclass(frozen=True)
class Model:
    """A network of a problem whose first variables are the problem's."""

    network: Network
    constant: int
    """What every assignment costs above the network's."""
    problem: Problem

    def assignment(self, x: Sequence[int]) -> tuple[int, ...]:
        """What an assignment of the network is in the problem."""
        return tuple(d[i] for d, i in zip(self.problem.domains, x, strict=False))


def model(problem: Problem, component: int, caps: Mapping[int, int]) -> Model:
    """The network of one component of a problem under caps on others and under its limits.

    Raises:
        SolverError: floats cannot tell caps or limits apart.
    """
    given = problem.limits if isinstance(problem, LimitedProblem) else Limits()
    build = _Build(problem, component, list(caps))
    for factor in problem.factors:
        build.put(factor)
    bounds = list(given.bounds)
    spans = [
        (u.variable, u.first, u.last, [u.weights[x] for x in problem.domains[u.variable]])
        for u in given.uses
    ]
    for k, cap in enumerate(caps.values()):
        row = len(bounds)
        bounds.append(cap - build.capped[k])
        spans += [(v, row, row + 1, weights) for v, weights in build.taken[k]]
    if max(*bounds, sum(max(s[3], default=0) for s in spans), 0) >= EXACT:
        raise SolverError(
            "limits, or what is taken of them, add up to 2^52 or more, and decompose counts in "
            "floats: divide them by one number, or use cpsat"
        )
    limits = Spans(
        np.array([v for v, *_ in spans], dtype=int),
        np.array([s[1] for s in spans], dtype=int),
        np.array([s[2] for s in spans], dtype=int),
        [np.array(s[3], dtype=float) for s in spans],
        np.array(bounds, dtype=float),
        np.maximum(np.array(bounds, dtype=float), 1.0),
    )
    tables = list(build.tables.values())
    return Model(Network(build.costs, list(build.tables), tables, limits), build.constant, problem)


class _Build:
    """Costs and tables, as factors come."""

    def __init__(self, problem: Problem, component: int, caps: list[int]) -> None:
        self.component, self.caps = component, caps
        self.index = [{x: i for i, x in enumerate(d)} for d in problem.domains]
        self.costs: list[Array] = [np.zeros(len(d)) for d in problem.domains]
        self.tables: dict[tuple[int, int], Array] = {}
        self.constant = 0
        self.capped = [0] * len(caps)
        self.taken: list[list[tuple[int, list[int]]]] = [[] for _ in caps]
        self.shared: dict[bytes, Array] = {}

    def put(self, factor: Factor) -> None:
        """Add a factor's costs."""
        if isinstance(factor, Grid):
            allowed = factor.table < FORBIDDEN
            least = int(factor.table.min(where=allowed, initial=FORBIDDEN))
            self.table(factor.scope, np.where(allowed, factor.table - least, np.inf), least)
            return
        rows = factor.rows
        capped = any(row.costs[c] for row in rows for c in self.caps)
        if len(factor.scope) > 2 or capped:
            self.rows(factor)
            return
        least, costs = _above([row.costs[self.component] for row in rows])
        table = np.full([len(self.index[v]) for v in factor.scope], np.inf)
        for row, cost in zip(rows, costs, strict=True):
            at = tuple(
                self.index[v].get(x, -1) for v, x in zip(factor.scope, row.values, strict=True)
            )
            if -1 not in at:
                table[at] = cost
        self.table(factor.scope, table, least)

    def rows(self, factor: Factor) -> None:
        """Add a variable whose values are a factor's rows."""
        new = len(self.costs)
        rows = factor.rows
        self.costs.append(np.zeros(len(rows)))
        least, costs = _above([row.costs[self.component] for row in rows])
        self.table((new,), np.array(costs, dtype=float), least)
        for k, c in enumerate(self.caps):
            least, weights = _above([row.costs[c] for row in rows])
            self.capped[k] += least
            self.taken[k].append((new, weights))
        for at, v in enumerate(factor.scope):
            held = np.array([self.index[v].get(r.values[at], -1) for r in rows], dtype=int)
            same = held[None, :] == np.arange(len(self.index[v]))[:, None]
            self.table((v, new), np.where(same, 0.0, np.inf), 0)

    def table(self, scope: tuple[int, ...], table: Array, least: int) -> None:
        """Add costs over none, one or two variables: `least` and what is in the table."""
        self.constant += least if np.isfinite(table).any() else 0
        if len(scope) == 1:
            self.costs[scope[0]] = self.costs[scope[0]] + table
        if len(scope) < 2:
            return
        a, b = scope
        if a > b:
            (a, b), table = (b, a), np.ascontiguousarray(table.T)
        if (a, b) in self.tables:
            table = self.tables[a, b] + table
        self.tables[a, b] = self.shared.setdefault(
            bytes(str(table.shape), "ascii") + table.tobytes(), table
        )


def _above(costs: list[int]) -> tuple[int, list[int]]:
    """The least of some costs, and what each is above it."""
    least = min(costs, default=0)
    return least, [cost - least for cost in costs]
