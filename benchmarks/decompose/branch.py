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

from benchmarks.decompose.contract import Way, contract
from benchmarks.decompose.network import Array, Network, Score
from benchmarks.decompose.part import Free, improve
from benchmarks.decompose.prices import HALF, PATIENCE, Prices
from benchmarks.decompose.search import Hints

LEAF, EFFORT = 40_000, 2.0
"""Pairs of values that CP-SAT is given at once, and its deterministic time for them."""
LEADS = (100.0, 10.0)
"""What passing a bound by a part of it counts, in costs of an assignment: by each, the best one."""


class Node(NamedTuple):
    """A part of the network made small, what is known of its bound, and where to begin."""

    bound: float
    """Of the whole, as all costs here but those of `network`."""
    network: Network
    constant: float
    """What every assignment costs in the whole above what it costs in `network`."""
    ways: tuple[Way, ...]
    """From the whole on."""
    prices: Array | None

    def lifted(self, x: Sequence[int]) -> list[int]:
        """An assignment of the node in values of the whole."""
        for way in reversed(self.ways):
            x = way.expand(x)
        return list(x)


class Visited(NamedTuple):
    """Nodes after their visit: what is left of them, and what was found on the way."""

    open: list[Node]
    best: list[int] | None
    """The best assignment seen, in values of the whole."""
    leads: list[list[int]]
    """Cheap ones that pass some bounds, in values of the whole: to be mended."""
    hints: Hints
    """Of the first node's own values."""
    work: float
    """Seconds that this takes, about: from counts, the same every time."""


def dive(node: Node, count: int, ceiling: float, deadline: float) -> Visited:
    """Visit a node and what it splits into, so many in all, the likelier first."""
    left, hints, seen = [node], None, _Seen(ceiling)
    for _ in range(count):
        if not left or (hints is not None and time.monotonic() > deadline):
            break
        now = left.pop()
        if now.bound <= seen.ceiling - 1 + HALF:
            children, own = _visit(now, seen, deadline)
            left += children
            hints = hints or own
    assert hints is not None
    leads = [x for _, x in seen.over.values()]
    return Visited(left, None if seen.best is None else seen.best[1], leads, hints, seen.work)


class _Seen:
    """Assignments met: the best, and cheap ones that pass bounds; in values of the whole."""

    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling
        self.best: tuple[Score, list[int]] | None = None
        self.over: dict[float, tuple[float, list[int]]] = {}
        self.work = 0.0

    def take(self, node: Node, x: list[int]) -> float:
        """Look at an assignment of a node; the least cost known, in the node's network."""
        score = node.network.score(x)
        score = score._replace(cost=score.cost + node.constant)
        if score.over and not score.broken:
            for weight in LEADS:
                promise = score.cost * (1 + weight * score.over)
                if promise < self.over.get(weight, (np.inf,))[0]:
                    self.over[weight] = promise, node.lifted(x)
        if self.best is None or score < self.best[0]:
            self.best = score, node.lifted(x)
            if score.whole:
                self.ceiling = min(self.ceiling, score.cost)
        return self.ceiling - node.constant


def _visit(node: Node, seen: _Seen, deadline: float) -> tuple[list[Node], Hints]:
    """Bound a node, and split it if it may have what costs less than what is known.

    Where the time is over before, its only child is itself, to go on with.
    """
    prices = Prices(node.network, lambda x: seen.take(node, x), deadline, node.prices)
    while not prices.done:
        prices.step()
    reduced = prices.polish(PATIENCE // 2)
    seen.work += prices.work
    hints = Hints(reduced.values, prices.best / prices.scale)
    bound = max(node.bound, reduced.bound + node.constant)
    gap = prices.ceiling - 1 + HALF - reduced.bound
    if gap < 0:
        return [], hints
    node = node._replace(bound=bound, prices=prices.best / prices.scale)
    if time.monotonic() > deadline:
        return [node], hints
    keep = [values <= gap for values in reduced.values]
    sides = split(node.network, prices, keep)
    node = node._replace(network=prices.ascent.moved(reduced, gap))
    if sum(int(np.isfinite(t).sum()) for t in node.network.tables) <= LEAF:
        x = min(prices.found, key=node.network.score)
        free = Free(list(range(len(x))), [np.flatnonzero(k) for k in keep])
        x = [int(i if k[i] else k.argmax()) for i, k in zip(x, keep, strict=True)]
        leaf = improve(node.network, x, free, EFFORT, deadline)
        if leaf is not None:
            seen.take(node, leaf.values)
            if leaf.proven:
                return [], hints
    children = [cut(node, side) for side in sides if all(k.any() for k in side)]
    return [child for child in children if child is not None], hints


def cut(node: Node, keep: list[Array]) -> Node | None:
    """The node with these values, made small; None where no solution is left."""
    network = node.network
    costs = [np.where(k, c, np.inf) for c, k in zip(network.costs, keep, strict=True)]
    left = contract(Network(costs, network.pairs, network.tables, network.limits))
    if left is None:
        return None
    prices = None if node.prices is None else node.prices[left.rows]
    constant = node.constant + left.constant
    return Node(node.bound, left.network, constant, (*node.ways, left.way), prices)


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
            counts = np.bincount([x[w] for x in prices.found], minlength=len(k)) * k
            order = np.argsort(-counts, kind="stable")
            half = 1 + int(np.searchsorted(counts[order].cumsum(), counts.sum() / 2))
            rest = counts[order[half:]].sum() + 1e-3 * k.sum() * (k.sum() > 1)
            if rest > best:
                best, v, low = rest, w, np.isin(np.arange(len(k)), order[:half])
        if not (keep[v] & low).any() or not (keep[v] & ~low).any():
            low = np.arange(len(keep[v])) == np.flatnonzero(keep[v])[0]
    out = []
    fewer = 2 * sum(low[x[v]] for x in prices.found) < len(prices.found)
    for side in (low, ~low) if fewer else (~low, low):
        masks = list(keep)
        masks[v] = keep[v] & side
        out.append(masks)
    return out
