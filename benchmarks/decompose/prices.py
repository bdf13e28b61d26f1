"""Prices for what limits allow (Lagrange multipliers): with them, the rest is a plain network.

Every assignment found on the way says how much its sum can be at any prices: a cut over them. The
next prices are best by all cuts, but not far from the best ones so far: a box about these grows
where that made the bound better, and shrinks where not (J. E. Kelley, "The cutting-plane method for
solving convex programs", 1960; R. E. Marsten et al., "The boxstep method for large-scale
optimization", Operations Research 23, 1975). Rows get a price once an assignment passes their
bound. Messages are kept from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.decompose.ascent import ENTRY, PAIR, Ascent, Reduced
from benchmarks.decompose.network import Array, Network

PATIENCE = 8
"""Sends without much gain after which messages have settled."""
SETTLED = 1e-4
"""Part of the bound that is much."""
ENTRIES, FEWEST, MOST = 10_000_000, 2, 30
"""Entries of tables to send over for one set of prices, but for the first; sends for that."""
DOUBLINGS = 16
"""Times that prices double at most."""
STEPS, WORTH = 4, 0.05
"""Prices are left where as many steps gain less than this part of the gap."""
NEAR = 0.2
"""Part of the bound that the gap is at most taken for: solutions known may be far from the best."""
CUTS = 100
"""Cuts that are kept."""
SCANT = 0.01
"""Prices are of a row's bound, but of no less than this part of what it was before contraction."""
BOX = 0.05
"""Part of the bound that the first box spans."""
HALF = 1e-3
"""Costs are whole: what is bounded by less than this below the next is not better."""


@dataclass
class Prices:
    """Prices of a network's rows, improved step by step; `best` are those of the best bound."""

    network: Network
    offer: Callable[[list[int]], float]
    """Takes an assignment to look at; returns the least cost known."""
    deadline: float
    start: Array | None = None
    """Prices to begin with, of a unit of each row."""
    bound: float = -np.inf
    ascent: Ascent = field(init=False)

    def __post_init__(self) -> None:
        self.ascent = Ascent(self.network)
        entries = sum(t.size for t in self.network.tables) + 1
        self.send = PAIR * len(self.network.tables) + ENTRY * entries
        self.work = 0.0
        self.sends = min(max(ENTRIES // entries, FEWEST), MOST)
        limits = self.network.limits
        self.rough = self.start is None  # what fits is looked for first
        self.past, self.broken = np.zeros(len(limits.bounds)), True
        self.scale = np.maximum(limits.bounds, SCANT * limits.units)
        self.room = self.network.limits.bounds / self.scale
        self.now = self.best = self.scale * (0.0 if self.start is None else self.start)
        self.rows = dict.fromkeys(np.flatnonzero(self.now).tolist())
        self.found: list[list[int]] = []
        self.cuts: list[tuple[float, Array]] = []
        self.box = 0.0
        self.fits = False
        self.done = False
        self.ceiling = self.model = np.inf
        self.log: list[float] = []

    def step(self) -> None:
        """Send messages at these prices until they settle, and choose the next."""
        first, most = not self.log, FEWEST if self.rough else self.sends
        self.ascent.price(self.now / self.scale)
        paid = float(self.now @ self.room)
        sent: list[float] = []
        while True:
            sent.append(self._send() - paid)
            if sent[-1] > self.ceiling - 1 + HALF or time.monotonic() > self.deadline:
                break
            gained = sent[-1] - sent[-PATIENCE] if len(sent) >= PATIENCE else np.inf
            closing = gained > 0 and gained * MOST > self.ceiling - sent[-1]
            if gained < SETTLED * max(abs(sent[-1]), 1.0) and not closing:
                break
            if len(sent) >= most and (self.rough or not first):
                break
        if not self.fits:  # what is left of the tables says how the bound goes, if nothing else
            past = self.network.limits.usage(self.ascent.least) / self.scale - self.room
            self.cuts.append((sent[-1] - float(self.now @ past), past))
        self.fits = False
        gain = sent[-1] - self.bound
        if gain > 0:
            self.bound, self.best = sent[-1], self.now
        self.log.append(self.bound)
        if self.rough:
            self.box = BOX * max(abs(self.bound), 1.0)
            self._raise()
            return
        if first:
            self.box = BOX * max(abs(self.bound), 1.0)
        elif gain > 0:
            self.box *= 2 if gain > 0.5 * (self.model - self.bound + gain) else 1
        else:
            self.box /= 3
        self._choose()

    def _raise(self) -> None:
        """Double the prices of rows that are over their bounds, until what is found fits."""
        over = self.past > 0
        least = BOX * max(abs(self.bound), 1.0) / max(over.sum(), 1)
        self.now = np.where(over, np.maximum(2 * self.now, least), self.now)
        self.rough = bool(self.broken or over.any()) and len(self.log) < DOUBLINGS
        self.done = time.monotonic() > self.deadline

    def polish(self, sends: int) -> Reduced:
        """Send messages at the best prices, and give what they prove."""
        self.ascent.price(self.best / self.scale)
        for _ in range(sends if time.monotonic() < self.deadline else 1):
            self._send()
        reduced = self.ascent.reduced(float(self.best @ self.room))
        self.bound = max(self.bound, reduced.bound)
        return reduced

    def _send(self) -> float:
        """Send messages there and back; the sum of the least entries."""
        self.work += self.send
        self._cut(self.ascent.forward())
        return self.ascent.backward()

    def _cut(self, found: list[int]) -> None:
        """Note what an assignment says of prices."""
        self.found = [*self.found[-40:], found]
        past = self.network.limits.usage(found) / self.scale - self.room
        for over, run in groupby(range(len(past)), lambda r: past[r] > 0):
            if over:
                worst = max(run, key=past.__getitem__)
                self.rows[worst] = None
        cost = self.network.cost(found)
        self.fits |= cost < np.inf
        self.past, self.broken = past, cost == np.inf
        if cost < np.inf and not any(c == cost and (p == past).all() for c, p in self.cuts[-3:]):
            self.cuts.append((cost, past))
        self.ceiling = self.offer(found)

    def _choose(self) -> None:
        """The best prices by the cuts, in the box about the best ones so far."""
        from ortools.linear_solver import pywraplp

        if not self.rows or not self.cuts:
            self.done = True
            return
        worth = [c + float(self.best @ p) for c, p in self.cuts]
        order = sorted(range(len(worth)), key=worth.__getitem__)[:CUTS]
        self.cuts = [self.cuts[k] for k in sorted(order)]
        lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        unit = max(abs(self.bound), 1.0)
        top = lp.NumVar(-lp.infinity(), lp.infinity(), "")
        prices = {
            r: lp.NumVar(
                max(self.best[r] - self.box, 0) / unit, (self.best[r] + self.box) / unit, ""
            )
            for r in self.rows
        }
        for cost, past in self.cuts:
            cut = lp.Constraint(-lp.infinity(), cost / unit)
            cut.SetCoefficient(top, 1)
            for r, price in prices.items():
                if past[r]:
                    cut.SetCoefficient(price, -float(past[r]))
        lp.Objective().SetCoefficient(top, 1)
        lp.Objective().SetMaximization()
        lp.Solve()
        self.now = np.zeros(len(self.scale))
        for r, price in prices.items():
            self.now[r] = max(price.solution_value(), 0) * unit
        self.model = top.solution_value() * unit
        gap = min(self.ceiling - 1 - self.bound, NEAR * abs(self.bound) + 1)
        slow = len(self.log) > STEPS and self.bound - self.log[-STEPS - 1] < WORTH * gap
        little = self.model - self.bound < SETTLED * max(abs(self.bound), 1.0)
        over = time.monotonic() > self.deadline or self.bound > self.ceiling - 1 + HALF
        self.done = slow or little or over
