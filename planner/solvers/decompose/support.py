"""Values that no solution has: without a partner in some table, or without room in some row.

The least that all others take of a row is taken in any solution. What a value takes above its
variable's own least must fit into the rest; and what goes for that leaves others without partners,
which raises the least again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardwright.planner.solvers.decompose.network import Array, Network


def supported(network: Network) -> list[Array] | None:
    """Masks of the values that may be in a solution; None where there is none."""
    keep = [np.isfinite(c) for c in network.costs]
    if not _partners(network, keep, range(len(keep))):
        return None
    while True:
        tight = _room(network, keep)
        if tight is None:
            return None
        if not tight:
            return keep
        if not _partners(network, keep, tight):
            return None


def _partners(network: Network, keep: list[Array], changed: Iterable[int]) -> bool:
    """Remove values without a partner, starting at variables that lost some; False: none left."""
    queue = dict.fromkeys(changed)
    if not all(keep[v].any() for v in queue):
        return False
    while queue:
        v = next(iter(queue))
        del queue[v]
        for _, w, table in network.near[v]:
            left = keep[w] & np.isfinite(table[keep[v]]).any(0)
            if left.sum() < keep[w].sum():
                if not left.any():
                    return False
                keep[w] = left
                queue[w] = None
    return True


def _room(network: Network, keep: list[Array]) -> list[int] | None:
    """Remove values that take more than is left; who lost some, None where a row is too full."""
    limits = network.limits
    variables = limits.variable.tolist()
    least = np.array([w[keep[v]].min() for w, v in zip(limits.weights, variables, strict=True)])
    room = limits.bounds - limits.spread(least)
    if (room < 0).any():
        return None
    lost: dict[int, None] = {}
    for k, v in enumerate(variables):
        if limits.last[k] > limits.first[k]:
            most = room[limits.first[k] : limits.last[k]].min() + least[k]
            left = keep[v] & (limits.weights[k] <= most)
            if left.sum() < keep[v].sum():
                keep[v] = left
                lost[v] = None
    return list(lost)
