"""A bound on a network by sending messages along an order of its variables (TRW-S).

Costs are moved between tables and variables, which changes no solution's sum, until the sum of the
least entries, a bound, is as large as this can make it: V. Kolmogorov, "Convergent tree-reweighted
message passing for energy minimization", IEEE PAMI 28, 2006. On networks whose local polytope is
integral that is the optimum, and so it is on most of those that models give.

Messages are any finite floats: the bound is a sum of least entries of what is left of the tables,
so that only its own rounding is to be allowed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.decompose.network import Array, Network

ULPS = 2.0**-50
PAIR, ENTRY = 1.6e-5, 1e-9
"""Seconds that a pair of variables and an entry of its table take of a send, about."""
FAR = 2.0**40
"""The most that a message moves: what a thousand neighbours send is far below 2^52."""


class Reduced(NamedTuple):
    """A bound, and what any solution with a value, or a pair of values, costs above it."""

    bound: float
    values: list[Array]


class Ascent:
    """Messages along the pairs of a network, in the order of the numbers of its variables."""

    def __init__(self, network: Network) -> None:
        self.network = network
        sizes = [len(c) for c in network.costs]
        self.messages = [np.zeros(sizes[v]) for a, b in network.pairs for v in (b, a)]
        later = [sum(w > v for _, w, _ in near) for v, near in enumerate(network.near)]
        degrees = [len(near) for near in network.near]
        self.shares = [1 / max(n, d - n, 1) for n, d in zip(later, degrees, strict=True)]
        self.costs = network.costs
        self.least = [0] * len(sizes)
        """The values of the least entries that `backward` summed up."""

    def price(self, prices: Array) -> None:
        """Add prices of the limits' rows to the costs of values."""
        limits = self.network.limits
        self.costs = list(self.network.costs)
        priced = limits.priced(prices).tolist()
        for v, p, weights in zip(limits.variable.tolist(), priced, limits.weights, strict=True):
            if p:
                self.costs[v] = self.costs[v] + p * weights

    def forward(self) -> list[int]:
        """Send messages to later variables; an assignment, each value best for those before it."""
        network, messages, shares = self.network, self.messages, self.shares
        found = [0] * len(self.costs)
        for v, near in enumerate(network.near):
            total = choice = self.costs[v]
            for e, w, table in near:
                message = messages[e ^ 1]
                total = total + message
                choice = choice + (message if w > v else table[:, found[w]])
            best = int(choice.argmin())
            if choice[best] == np.inf:  # those before it leave none: the least forbidden ones
                best = _least_forbidden(network, v, found, total)
            found[v] = best
            total = shares[v] * (total - total.min())
            for e, w, table in near:
                if w > v:
                    out = ((total - messages[e ^ 1])[:, None] + table).min(0)
                    messages[e] = out - out.min()
        return found

    def backward(self) -> float:
        """Send messages to earlier variables; the sum of the least entries."""
        network, messages, shares = self.network, self.messages, self.shares
        bound = 0.0
        for v in range(len(self.costs) - 1, -1, -1):
            near = network.near[v]
            total = self.costs[v]
            for e, _, _ in near:
                total = total + messages[e ^ 1]
            self.least[v] = int(total.argmin())
            least = total[self.least[v]]
            bound += least
            total = shares[v] * (total - least)
            for e, w, table in near:
                if w < v:
                    out = ((total - messages[e ^ 1])[:, None] + table).min(0)
                    least = out.min()
                    bound += least
                    messages[e] = out - least
        return float(bound)

    def reduced(self, paid: float = 0.0) -> Reduced:
        """The bound after `backward`, less what limits pay back, and reduced costs of values.

        It is computed anew from costs and messages alone, and less than it by more than the
        rounding of floats: whoever relies on it need not trust how messages came about.
        """
        bound, largest, entries = -paid, abs(paid), 1
        rests: list[Array] = []
        values: list[Array] = []
        for v, (near, total) in enumerate(zip(self.network.near, self._totals(), strict=True)):
            least = total.min()
            bound += least
            rests.append(total - least)
            before = sum(w < v for _, w, _ in near)
            values.append((1 - before * self.shares[v]) * rests[v])
            largest = max(
                largest,
                _largest(self.costs[v]),
                *[_largest(self.messages[e]) for e, _, _ in near],
                0.0,
            )
            entries += 2 + len(near)
        for v, near in enumerate(self.network.near):
            for e, w, table in near:
                if w < v:
                    left = self._left(v, rests[v], e, table)
                    least = left.min()
                    bound += least
                    left -= least
                    values[v] = values[v] + left.min(1)
                    values[w] = values[w] + left.min(0)
                    entries += 4
        return Reduced(float(bound - entries * largest * ULPS), values)

    def moved(self, reduced: Reduced, gap: float) -> Network:
        """The network with its messages moved into it, without what costs more above the bound.

        Every assignment that is left costs what it did, to the last digit: what is moved is whole.
        Here messages can begin anew, from nothing.
        """
        network, values = self.network, reduced.values
        sent = [np.clip(np.round(m), -FAR, FAR) for m in self.messages]
        costs: list[Array] = []
        tables = list(network.tables)
        for v, (near, total) in enumerate(zip(network.near, self._totals(), strict=True)):
            own = network.costs[v]
            for e, w, table in near:
                own = own + sent[e ^ 1]
                if w < v:
                    left = self._left(v, total - total.min(), e, table)
                    left -= left.min()
                    above = left + (values[v] - left.min(1))[:, None] + (values[w] - left.min(0))
                    now = table - sent[e ^ 1][:, None] - sent[e]
                    tables[e // 2] = np.where(above <= gap, now, np.inf).T
            costs.append(np.where(values[v] <= gap, own, np.inf))
        return Network(costs, network.pairs, tables, network.limits)

    def _totals(self) -> list[Array]:
        """Per variable what its values cost with all messages to it."""
        near = enumerate(self.network.near)
        return [sum((self.messages[e ^ 1] for e, _, _ in own), self.costs[v]) for v, own in near]

    def _left(self, v: int, rest: Array, e: int, table: Array) -> Array:
        """What is left of the table of a directed pair from v to an earlier variable."""
        own = self.shares[v] * rest - self.messages[e ^ 1]
        return own[:, None] + table - self.messages[e][None, :]


def _largest(a: Array) -> float:
    """The largest finite magnitude."""
    finite = np.abs(a[np.isfinite(a)])
    return float(finite.max()) if finite.size else 0.0


def _least_forbidden(network: Network, v: int, found: Sequence[int], total: Array) -> int:
    """The value with which the fewest tables forbid what was found, and of these the cheapest."""
    forbidden = np.isinf(network.costs[v]) * float(len(network.near[v]) + 1)
    for _, w, table in network.near[v]:
        if w < v:
            forbidden = forbidden + np.isinf(table[:, found[w]])
    return int(np.where(forbidden == forbidden.min(), total, np.inf).argmin())
