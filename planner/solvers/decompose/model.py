"""From a problem to a network, and from an assignment of the network back.

A factor of more than two variables, and one that a cap counts, becomes a variable of its own whose
values are its rows, tied to the variables that it ranges over. A cap is then a limit of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.solvers.decompose.network import Array, Network, Spans
from shardwright.planner.solvers.grid import FORBIDDEN, Grid
from shardwright.planner.solvers.problem import Factor, Problem


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
    """The network of one component of a problem under caps on others and under its limits."""
    build = _Build(problem, component, list(caps))
    for factor in problem.factors:
        build.put(factor)
    bounds = [float(b) for b in problem.limits.bounds]
    spans = [
        (u.variable, u.first, u.last, np.array([u.weights[x] for x in problem.domains[u.variable]]))
        for u in problem.limits.uses
    ]
    for k, cap in enumerate(caps.values()):
        row = len(bounds)
        bounds.append(float(cap - build.capped[k]))
        spans += [(v, row, row + 1, weights) for v, weights in build.taken[k]]
    limits = Spans(
        np.array([v for v, *_ in spans], dtype=int),
        np.array([s[1] for s in spans], dtype=int),
        np.array([s[2] for s in spans], dtype=int),
        [s[3].astype(float) for s in spans],
        np.array(bounds),
        np.maximum(bounds, 1.0),
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
        self.taken: list[list[tuple[int, Array]]] = [[] for _ in caps]
        self.shared: dict[bytes, Array] = {}

    def put(self, factor: Factor) -> None:
        """Add a factor's costs."""
        if isinstance(factor, Grid):
            table = np.where(factor.table < FORBIDDEN, factor.table, np.inf)
            self.table(factor.scope, table)
            return
        rows = factor.rows
        capped = any(row.costs[c] for row in rows for c in self.caps)
        if len(factor.scope) > 2 or capped:
            self.rows(factor)
            return
        table = np.full([len(self.index[v]) for v in factor.scope], np.inf)
        for row in rows:
            at = tuple(
                self.index[v].get(x, -1) for v, x in zip(factor.scope, row.values, strict=True)
            )
            if -1 not in at:
                table[at] = row.costs[self.component]
        self.table(factor.scope, table)

    def rows(self, factor: Factor) -> None:
        """Add a variable whose values are a factor's rows."""
        new = len(self.costs)
        rows = factor.rows
        self.costs.append(np.zeros(len(rows)))
        self.table((new,), np.array([float(r.costs[self.component]) for r in rows]))
        for k, c in enumerate(self.caps):
            weights = np.array([float(r.costs[c]) for r in rows])
            least = weights.min() if len(rows) else 0.0
            self.capped[k] += int(least)
            self.taken[k].append((new, weights - least))
        for at, v in enumerate(factor.scope):
            held = np.array([self.index[v].get(r.values[at], -1) for r in rows], dtype=int)
            same = held[None, :] == np.arange(len(self.index[v]))[:, None]
            self.table((v, new), np.where(same, 0.0, np.inf))

    def table(self, scope: tuple[int, ...], table: Array) -> None:
        """Add costs over none, one or two variables; none of those that are kept is negative."""
        finite = table[np.isfinite(table)]
        least = int(finite.min()) if finite.size else 0
        if not scope:
            if finite.size:
                self.constant += least
            return
        if least:
            table = table - least
            self.constant += least
        if len(scope) == 1:
            self.costs[scope[0]] = self.costs[scope[0]] + table
            return
        a, b = scope
        if a > b:
            (a, b), table = (b, a), np.ascontiguousarray(table.T)
        if (a, b) in self.tables:
            table = self.tables[a, b] + table
        self.tables[a, b] = self.shared.setdefault(
            bytes(str(table.shape), "ascii") + table.tobytes(), table
        )
