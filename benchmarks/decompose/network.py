"""A problem as arrays: costs of values, tables of pairs, and limits; `inf` is what is forbidden.

Numbers are floats of 64 bits. What is found with them is a candidate, scored exactly by the
problem that it came from; bounds allow for their rounding (`ascent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spans:
    """Limits on rows in an order: `weights[k][value]` of `variable[k]` on first <= row < last."""

    variable: Array
    first: Array
    last: Array
    weights: list[Array]
    bounds: Array
    units: Array
    """Per row in what it is natural to count: its bound before anything was taken from it."""

    def spread(self, values: Array) -> Array:
        """Per row the sum of the values (one a span) of the spans that hold it."""
        change = np.zeros(len(self.bounds) + 1)
        np.add.at(change, self.first, values)
        np.subtract.at(change, self.last, values)
        return np.cumsum(change)[:-1]

    def chosen(self, x: Sequence[int]) -> Array:
        """Per span what an assignment takes."""
        taken = [w[x[v]] for w, v in zip(self.weights, self.variable.tolist(), strict=True)]
        return np.array(taken, dtype=float)

    def usage(self, x: Sequence[int]) -> Array:
        """What an assignment takes of each row."""
        return self.spread(self.chosen(x))

    def priced(self, prices: Array) -> Array:
        """Per span the sum of its rows' prices."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        return total[self.last] - total[self.first]

    def least(self, values: Array) -> Array:
        """Per span the least of its rows' values; infinity for one without rows."""
        out = np.full(len(self.first), np.inf)
        wide, width = values.astype(float), 1
        while width <= len(values):  # wide[row] is the least of `width` rows from there on
            long = self.last - self.first
            own = (width <= long) & (long < 2 * width)
            out[own] = np.minimum(wide[self.first[own]], wide[self.last[own] - width])
            wide = np.minimum(wide[:-width], wide[width:])
            width *= 2
        return out

    @cached_property
    def of(self) -> dict[int, list[int]]:
        """Per variable its spans that are not empty."""
        out: dict[int, list[int]] = {}
        for k, v in enumerate(self.variable.tolist()):
            if self.last[k] > self.first[k]:
                out.setdefault(v, []).append(k)
        return out


class Score(NamedTuple):
    """Less is better, in this order."""

    broken: int
    """Entries that are forbidden."""
    over: float
    """By how much bounds are passed, in all, in parts of them."""
    cost: float

    @property
    def whole(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken and not self.over


@dataclass(frozen=True)
class Network:
    """Costs of values, tables over pairs of variables (each pair once), limits."""

    costs: list[Array]
    pairs: list[tuple[int, int]]
    tables: list[Array]
    """Per pair (a, b) its costs [value of a, value of b]."""
    limits: Spans

    @cached_property
    def near(self) -> list[list[tuple[int, int, Array]]]:
        """Per variable: number of the directed pair from it, the other one, table [own, other]."""
        out: list[list[tuple[int, int, Array]]] = [[] for _ in self.costs]
        for k, ((a, b), table) in enumerate(zip(self.pairs, self.tables, strict=True)):
            out[a].append((2 * k, b, table))
            out[b].append((2 * k + 1, a, table.T))
        return out

    def cost(self, x: Sequence[int]) -> float:
        """What an assignment costs."""
        total = sum([float(c[v]) for c, v in zip(self.costs, x, strict=True)])
        return total + sum(
            [float(t[x[a], x[b]]) for (a, b), t in zip(self.pairs, self.tables, strict=True)]
        )

    def most(self) -> float:
        """No assignment that nothing forbids costs more."""
        tables = [*self.costs, *self.tables]
        return sum(float(t[np.isfinite(t)].max(initial=0)) for t in tables)

    def over(self, x: Sequence[int]) -> float:
        """By how much an assignment passes bounds, in all, in parts of them."""
        limits = self.limits
        return float(np.maximum((limits.usage(x) - limits.bounds) / limits.units, 0).sum())

    def score(self, x: Sequence[int]) -> Score:
        """How good an assignment is."""
        terms = [float(c[v]) for c, v in zip(self.costs, x, strict=True)]
        terms += [float(t[x[a], x[b]]) for (a, b), t in zip(self.pairs, self.tables, strict=True)]
        broken = terms.count(np.inf)
        return Score(
            broken, self.over(x), sum(t for t in terms if t < np.inf) if broken else sum(terms)
        )


def empty(network: Network) -> bool:
    """Whether some variable has no value left."""
    return any(len(c) == 0 for c in network.costs)
