"""Large neighbourhood search: parts of an assignment are solved again, workers side by side.

Which parts: near a variable that is broken or where the assignment costs more than the prices of
the bound say (P. Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP 1998). How large: larger while parts are proven, smaller while not.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.decompose.mend import mend
from benchmarks.decompose.network import Array, Network
from benchmarks.decompose.part import SOLVING, Found, Free, improve

FEWEST, MOST = 2_000, 60_000
"""Pairs of values in a part at an effort of one."""
TERMS = 32
"""Terms in rows of the limits that take as long as a pair of values."""


class Searched(NamedTuple):
    """An assignment, and how large parts should be."""

    x: list[int]
    size: float


class Hints(NamedTuple):
    """What a bound says of solutions."""

    values: list[Array]
    """Reduced costs of values: the least are the most promising."""
    prices: Array
    """Per row of the limits."""


@dataclass
class Search:
    """An assignment that gets better, and what is known of it."""

    network: Network
    x: list[int]
    hints: Hints
    seed: int = 0
    size: float = 6_000
    effort: float = 1.0
    """CP-SAT's deterministic time for a part."""
    fresh: bool = False
    """Whether the assignment has not been looked at by single variables."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.score = self.network.score(self.x)

    def run(self, count: int, work: float, deadline: float) -> Searched:
        """Solve parts one after another: so many and so much, less where the time is over."""
        if not self.score.broken and (self.fresh or self.score.over):
            self.x = mend(self.network, self.x, deadline)
            self.score = self.network.score(self.x)
        while (count > 0 or work > 0) and time.monotonic() < deadline:
            part, count = self.part(), count - 1
            if part.variables:
                ceiling = self.score.cost if self.score.whole else np.inf
                found = improve(self.network, self.x, part, self.effort, deadline, ceiling)
                self.take(part, found)
                work -= found.work if found is not None else SOLVING * self.effort
        return Searched(self.x, self.size)

    def take(self, part: Free, found: Found | None) -> None:
        """Take over what was found if that makes the assignment better."""
        self.size *= 1.1 if found is not None and found.proven else 0.85
        self.size = min(max(self.size, FEWEST), MOST * self.effort)
        if found is None:
            return
        x = list(self.x)
        for v, value in zip(part.variables, found.values, strict=True):
            x[v] = value
        score = self.network.score(x)
        if score < self.score:
            self.x, self.score = x, score

    def part(self) -> Free:
        """Variables about a centre, with the most promising of their values."""
        network, most = self.network, self.random.choice([3, 5, 8, 16, 32, 10_000])
        values: dict[int, Array] = {}
        entries, users = 0.0, 0
        for v in self._about(self._centre()):
            if len(network.costs[v]) == 1:
                continue
            costs = self.hints.values[v]  # often many are alike: any of them
            chance = np.array([self.random.random() for _ in range(len(costs))])
            own = np.lexsort(np.stack((chance, costs)))[:most]
            values[v] = own if self.x[v] in own else np.append(own, self.x[v])
            entries += sum(
                len(values[v]) * len(values[w]) for _, w, _ in network.near[v] if w in values
            )
            spans = network.limits.of.get(v, [])
            rows = int((network.limits.last[spans] - network.limits.first[spans]).sum())
            users += len(spans)
            entries += len(values[v]) * min(rows, users) / TERMS
            if entries > self.size:
                break
        return Free(list(values), list(values.values()))

    def _centre(self) -> int:
        """A variable, one that is broken if there is any."""
        network, x = self.network, self.x
        if self.score[0]:
            broken = [
                v
                for (a, b), t in zip(network.pairs, network.tables, strict=True)
                if t[x[a], x[b]] == np.inf
                for v in (a, b)
            ]
            return self.random.choice(broken or [0])
        limits = network.limits
        if self.score[1]:
            row = int(np.argmax((limits.usage(x) - limits.bounds) / limits.units))
            inside = (limits.first <= row) & (row < limits.last)
            return int(self.random.choice(limits.variable[inside].tolist()))
        if self.random.random() < 0.5:
            lost = [float(own[i]) for own, i in zip(self.hints.values, x, strict=True)]
            if any(lost):
                return self.random.choices(range(len(x)), lost)[0]
        return self.random.randrange(len(x))

    def _about(self, centre: int) -> Iterator[int]:
        """Variables in an order of how near they are, with some chance in it.

        Near is who shares a table; now and then, who uses the same row of the limits, those that
        may take the most of it first.
        """
        queue, seen = [(0.0, centre)], {centre}
        if self.random.random() < 0.4:
            queue = self._together(centre)
            seen = {v for _, v in queue}
            heapq.heapify(queue)
        while queue:
            far, v = heapq.heappop(queue)
            yield v
            for _, w, _ in self.network.near[v]:
                if w not in seen:
                    seen.add(w)
                    heapq.heappush(queue, (far + 0.5 + self.random.random(), w))

    def _together(self, centre: int) -> list[tuple[float, int]]:
        """Users of a row, one that has a price or that the centre uses, and how near they are."""
        limits, prices = self.network.limits, self.hints.prices
        if prices.any() and not self.score.over and self.random.random() < 0.8:
            row = self.random.choices(range(len(prices)), prices.tolist())[0]
        elif centre in limits.of:
            k = limits.of[centre][0]
            row = self.random.randrange(int(limits.first[k]), int(limits.last[k]))
        else:
            return [(0.0, centre)]
        users = np.flatnonzero((limits.first <= row) & (row < limits.last)).tolist()
        spread = {
            int(limits.variable[k]): float(limits.weights[k].max() - limits.weights[k].min())
            for k in users
        }
        most = max(spread.values(), default=0.0) or 1.0
        return [
            (self.random.random() * (1 - 0.9 * taken / most), v) for v, taken in spread.items()
        ] or [(0.0, centre)]
