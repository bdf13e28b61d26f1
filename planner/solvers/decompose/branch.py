"""Branch and bound on how much of a limit a variable takes.

Bounds by prices are weak where a few variables take much of a row of which little is left: which of
them may is a choice that prices cannot make. Once it is made, values go for want of room, and the
bound is nearly tight again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.solvers.decompose.network import Array, Network, Score
from shardwright.planner.solvers.decompose.prices import HALF, PATIENCE, Prices, Start
from shardwright.planner.solvers.decompose.search import Hints
from shardwright.planner.solvers.decompose.support import supported


class Node(NamedTuple):
    """A part of the network, what is known of its bound, and where to begin."""

    bound: float
    network: Network
    kept: list[Array]
    """Per variable the numbers of its values in the whole."""
    start: Start | None


def cut(node: Node, keep: list[Array]) -> Node:
    """The node with these values only."""
    start = node.start
    if start is not None:
        pairs = node.network.pairs
        ends = [v for a, b in pairs for v in (b, a)]
        start = Start([m[keep[v]] for m, v in zip(start.messages, ends, strict=True)], start.prices)
    kept = [own[k] for own, k in zip(node.kept, keep, strict=True)]
    return Node(node.bound, node.network.restricted(keep), kept, start)


class Visited(NamedTuple):
    """A node after its visit: what is left of it, and what was found on the way."""

    bound: float
    children: list[Node]
    best: list[int] | None
    """The best assignment seen, in values of the whole."""
    hints: Hints
    """Of the node's own values."""
    kept: list[Array]


def visit(node: Node, ceiling: float, deadline: float) -> Visited:
    """Bound a node, and split it if it may have what costs less than `ceiling`.

    Where the time is over before, its only child is itself, to go on with.
    """
    best: tuple[Score, list[int]] | None = None

    def offer(x: list[int]) -> float:
        nonlocal best
        score = node.network.score(x)
        if best is None or score < best[0]:
            best = score, x
        return min(ceiling, best[0].cost) if best[0].whole else ceiling

    prices = Prices(node.network, offer, deadline, node.start)
    while not prices.done:
        prices.step()
    reduced = prices.polish(PATIENCE // 2)
    found = None if best is None else lifted(node, best[1])
    hints = Hints(reduced.values, prices.best)
    bound, most = max(node.bound, reduced.bound), prices.ceiling - 1 + HALF
    if bound > most:
        return Visited(bound, [], found, hints, node.kept)
    node = node._replace(bound=bound, start=Start(prices.ascent.messages, prices.best))
    if time.monotonic() > deadline:
        return Visited(bound, [node], found, hints, node.kept)
    keep = [values <= most - reduced.bound for values in reduced.values]
    children: list[Node] = []
    for side in split(node.network, prices, keep):
        if all(k.any() for k in side):
            child = cut(node, side)
            left = supported(child.network)
            if left is not None:
                children.append(cut(child, left))
    return Visited(bound, children, found, hints, node.kept)


def lifted(node: Node, x: Sequence[int]) -> list[int]:
    """An assignment of a node in values of the whole."""
    return [int(own[value]) for own, value in zip(node.kept, x, strict=True)]


def split(network: Network, prices: Prices, keep: list[Array]) -> list[list[Array]]:
    """Two lists of masks that part the values of one variable, the less likely side first."""
    limits = network.limits
    price = limits.priced(prices.best / prices.scale)
    best, at = 0.0, (-1, np.zeros(0, bool))
    for k in np.flatnonzero(price > 0).tolist():
        v = int(limits.variable[k])
        weights = limits.weights[k]
        used = np.array([weights[x[v]] for x in prices.found])
        worth = price[k] * used.std()
        if worth > best:
            low = weights <= used.mean()
            if (keep[v] & low).any() and (keep[v] & ~low).any():
                best, at = worth, (v, low)
    v, low = at
    if v < 0:
        for w, k in enumerate(keep):
            if k.sum() > 1:
                counts = np.bincount([x[w] for x in prices.found], minlength=len(k)) * k
                rest = counts.sum() - counts.max()
                if rest > best:
                    best, v = rest, w
                    low = np.arange(len(k)) == counts.argmax()
    if v < 0:
        v = max(range(len(keep)), key=lambda w: keep[w].sum())
        low = np.arange(len(keep[v])) == np.flatnonzero(keep[v])[0]
    out = []
    fewer = 2 * sum(low[x[v]] for x in prices.found) < len(prices.found)
    for side in (low, ~low) if fewer else (~low, low):
        masks = list(keep)
        masks[v] = keep[v] & side
        out.append(masks)
    return out
