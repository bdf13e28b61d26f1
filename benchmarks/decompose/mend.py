"""Mend and improve a whole assignment by changing one variable at a time.

Rows that are used beyond their bound get a price, which doubles from sweep to sweep while they are;
where there is room it halves, and goes. A change must not fill another row beyond its bound. So an
assignment that prices alone leave somewhat over bounds comes within them, next to where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.decompose.network import Array, Network

SWEEPS = 60
FIRST = 1e-3
"""The first price of a row's whole bound, as a part of what the assignment costs."""


def mend(network: Network, x: Sequence[int], deadline: float) -> list[int]:
    """The best assignment met on the way from x; x itself if none is better."""
    limits = network.limits
    now, best = list(x), (network.score(x), list(x))
    usage = limits.usage(now)
    first = FIRST * max(best[0].cost, 1.0) / limits.units
    prices = np.zeros(len(usage))
    quiet = 0
    for _ in range(SWEEPS):
        over = usage > limits.bounds
        prices = np.where(over, np.maximum(2 * prices, first), prices / 2)
        prices[prices < first / 8] = 0
        changed = _sweep(network, now, usage, prices, over, deadline)
        score = network.score(now)
        if score < best[0]:
            best, quiet = (score, list(now)), 0
        else:
            quiet += 1
        if time.monotonic() > deadline or quiet > 12 or (not changed and not over.any()):
            break
    return best[1]


def _sweep(
    network: Network, x: list[int], usage: Array, prices: Array, over: Array, deadline: float
) -> int:
    """Give variables their best values at these prices; how many have another one now."""
    limits = network.limits
    priced, full = limits.priced(prices), limits.priced(over.astype(float)) > 0
    changed = 0
    touched = {int(v) for v in limits.variable[full]} if over.any() else range(len(x))
    for v in sorted(touched):
        if time.monotonic() > deadline:
            break
        if len(network.costs[v]) == 1:
            continue
        total = network.costs[v]
        for _, w, table in network.near[v]:
            total = total + table[:, x[w]]
        for k in limits.of.get(v, ()):
            weights, rows = limits.weights[k], slice(limits.first[k], limits.last[k])
            room = (limits.bounds[rows] - usage[rows]).min(initial=np.inf)
            more = weights - weights[x[v]]
            total = np.where(more <= max(room, 0), total + priced[k] * weights, np.inf)
        new = int(total.argmin())
        if total[new] < total[x[v]]:
            for k in limits.of.get(v, ()):
                weights = limits.weights[k]
                usage[limits.first[k] : limits.last[k]] += weights[new] - weights[x[v]]
            x[v] = new
            changed += 1
    return changed
