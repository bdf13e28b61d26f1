"""A network made smaller, with the same least cost: values and variables go.

A value goes that has no partner in some table or no room in some row, and one for which another
costs and takes no more, whatever its neighbours' values are. A variable goes where a neighbour's
value leaves it one value, and where it takes nothing of a limit and has two neighbours at most:
its best value follows from theirs (U. Bertelè and F. Brioschi, "Nonserial Dynamic Programming",
1972). Of a model's graph most variables go: they pass on what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.decompose.network import Array, Network, empty
from benchmarks.decompose.rows import scarce


class Gone(NamedTuple):
    """A variable that follows from others: the value of least cost, given theirs."""

    variable: int
    kept: Array
    costs: Array
    near: list[tuple[int, Array, Array]]
    """Other variable, its values at the time, table [own, other]."""


@dataclass(frozen=True)
class Way:
    """From an assignment of a smaller network to one of the whole."""

    variables: list[int]
    """What each variable of the smaller one is in the whole."""
    kept: list[Array]
    """And the values that it has left."""
    gone: list[Gone]

    def expand(self, x: Sequence[int]) -> list[int]:
        """The assignment of the whole that one of the smaller network stands for."""
        found = {v: int(own[i]) for v, own, i in zip(self.variables, self.kept, x, strict=True)}
        for one in reversed(self.gone):
            costs = one.costs
            for w, kept, table in one.near:
                costs = costs + table[:, int(np.searchsorted(kept, found[w]))]
            found[one.variable] = int(one.kept[int(costs.argmin())])
        return [found[v] for v in range(len(found))]


class Contracted(NamedTuple):
    """A smaller network."""

    network: Network
    constant: float
    """What every assignment costs in the whole above what it costs here."""
    rows: Array
    """Rows of the limits that are left."""
    way: Way


def contract(network: Network) -> Contracted | None:
    """What is left of a network; None where it has no solution."""
    if empty(network):
        return None
    work = _Work(network)
    changed = set(work.near)
    while True:
        crowded = work.limit()
        if crowded is None:
            return None
        changed = (changed | crowded) & work.near.keys()
        if not changed:
            return work.result()
        work.changed = set()
        for v in sorted(changed, key=lambda v: (len(work.near[v]), v)):
            if v in work.near and not work.visit(v):
                return None
        changed = work.changed


class _Work:
    """The network on the way."""

    def __init__(self, network: Network) -> None:
        self.costs = dict(enumerate(network.costs))
        self.kept = {v: np.arange(len(c)) for v, c in enumerate(network.costs)}
        self.near: dict[int, dict[int, Array]] = {v: {} for v in self.costs}
        for (a, b), table in zip(network.pairs, network.tables, strict=True):
            self.near[a][b], self.near[b][a] = table, table.T
        self.limits = network.limits
        self.rows = np.arange(len(network.limits.bounds))
        self.changed: set[int] = set()
        self.gone: list[Gone] = []
        self.constant = 0.0

    def limit(self) -> set[int] | None:
        """See what is still scarce, and who has values for which there is no room; None: nobody."""
        self.limits, rows = scarce(self.limits)
        limits = self.limits
        self.rows = self.rows[rows]
        self.room = limits.least(limits.bounds)
        self.spans: dict[int, list[int]] = {v: [] for v in self.near}
        crowded: set[int] = set()
        for k, v in enumerate(limits.variable.tolist()):
            self.spans[v].append(k)
            if limits.weights[k].max() > self.room[k]:
                crowded.add(v)
        return None if (limits.bounds < 0).any() else crowded

    def visit(self, v: int) -> bool:
        """Remove values of a variable, itself where it is determined; False: no value is left."""
        keep = np.isfinite(self.costs[v])
        for table in self.near[v].values():
            keep &= np.isfinite(table).any(1)
        for k in self.spans[v]:
            keep &= self.limits.weights[k] <= self.room[k]
        if not keep.any():
            return False
        keep[keep] = self._best(v, keep)
        if not keep.all():
            self._keep(v, keep)
        if len(self.costs[v]) == 1:
            self._fix(v)
            return True
        for w, table in self.near[v].items():
            allowed = np.isfinite(table)
            if (allowed.sum(0) == 1).all() and self._fits(v, w):
                self._merge(v, w, allowed.argmax(0))
                return True
        if not self.spans[v] and self._few(v):
            self._eliminate(v)
        return True

    def _best(self, v: int, keep: Array) -> Array:
        """Which of these values no other one is as good as in all that counts."""
        columns = [self.costs[v][keep, None], *[t[keep] for t in self.near[v].values()]]
        columns += [self.limits.weights[k][keep, None] for k in self.spans[v]]
        rows = np.concatenate(columns, axis=1)
        left = np.ones(len(rows), bool)
        for i, row in enumerate(rows):
            left[i] = False
            left[i] = not (rows[left] <= row).all(1).any()
        return left

    def _keep(self, v: int, keep: Array) -> None:
        """Restrict the values of a variable."""
        self.costs[v], self.kept[v] = self.costs[v][keep], self.kept[v][keep]
        for k in self.spans[v]:
            self.limits.weights[k] = self.limits.weights[k][keep]
        for w, table in self.near[v].items():
            self._put(v, w, table[keep])

    def _put(self, v: int, w: int, table: Array) -> None:
        self.near[v][w], self.near[w][v] = table, table.T
        self.changed |= {v, w}

    def _add(self, v: int, w: int, table: Array) -> None:
        self._put(v, w, self.near[v][w] + table if w in self.near[v] else table)

    def _remove(self, v: int) -> dict[int, Array]:
        """Take a variable out whose value follows from its neighbours'; their tables with it."""
        near = self.near.pop(v)
        past = [(w, self.kept[w], table) for w, table in near.items()]
        self.gone.append(Gone(v, self.kept.pop(v), self.costs.pop(v), past))
        for w in near:
            del self.near[w][v]
        self.changed |= near.keys()
        return near

    def _fix(self, v: int) -> None:
        """Put a variable of one value into the costs of its neighbours; the limits keep it."""
        self.constant += float(self.costs[v][0])
        for w, table in self._remove(v).items():
            self.costs[w] = self.costs[w] + table[0]

    def _fits(self, v: int, w: int) -> bool:
        """Whether tables of w that stand for those of v have no more entries than these."""
        values, others = len(self.costs[v]), sum([len(self.costs[u]) for u in self.near[v]])
        return len(self.costs[w]) * (others - len(self.costs[w])) <= values * others

    def _merge(self, v: int, w: int, value: Array) -> None:
        """Put a variable into a neighbour, each of whose values leaves it one value."""
        costs, near = self.costs[v], self._remove(v)
        table = near.pop(w)
        self.costs[w] = self.costs[w] + costs[value] + table[value, np.arange(len(value))]
        for u, other in near.items():
            self._add(w, u, other[value])
        for k in self.spans.pop(v):
            self.limits.variable[k] = w
            self.limits.weights[k] = self.limits.weights[k][value]
            self.spans[w].append(k)

    def _few(self, v: int) -> bool:
        """Whether a table that stands for a variable has no more entries than those it has."""
        sizes = [len(self.costs[w]) for w in self.near[v]]
        if len(sizes) == 2:
            return sizes[0] * sizes[1] <= len(self.costs[v]) * sum(sizes)
        return len(sizes) < 2

    def _eliminate(self, v: int) -> None:
        """Put the best value of a variable into a table over its neighbours, two at most."""
        costs, near = self.costs[v], self._remove(v)
        if not near:
            self.constant += float(costs.min())
            return
        (a, first), *rest = near.items()
        first = first + costs[:, None]
        if not rest:
            self.costs[a] = self.costs[a] + first.min(0)
            return
        ((b, second),) = rest
        self._add(a, b, np.stack([(column[:, None] + second).min(0) for column in first.T]))

    def result(self) -> Contracted:
        """What is left."""
        variables = sorted(self.near)
        at = {v: k for k, v in enumerate(variables)}
        pairs = [(v, w) for v in variables for w in sorted(self.near[v]) if v < w]
        limits = self.limits
        own = np.array([at[v] for v in limits.variable.tolist()], dtype=int)
        network = Network(
            [self.costs[v] for v in variables],
            [(at[v], at[w]) for v, w in pairs],
            [np.ascontiguousarray(self.near[v][w]) for v, w in pairs],
            replace(limits, variable=own),
        )
        way = Way(variables, [self.kept[v] for v in variables], self.gone)
        return Contracted(network, self.constant, self.rows, way)
