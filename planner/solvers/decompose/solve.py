"""The solver: bounds by prices and messages, branch and bound, and search by parts of what is known.

Nodes of the tree and parts of the best assignment are solved in rounds, a task a worker; what they
find is put together in the order of the tasks, so that a run is the same every time, up to where
the clock ends it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.solvers.decompose.branch import Node, Visited, cut, lifted, visit
from shardwright.planner.solvers.decompose.model import Model, model
from shardwright.planner.solvers.decompose.network import Score
from shardwright.planner.solvers.decompose.parallel import side_by_side
from shardwright.planner.solvers.decompose.prices import HALF
from shardwright.planner.solvers.decompose.search import Search
from shardwright.planner.solvers.decompose.support import supported
from shardwright.planner.solvers.problem import Problem, Result

ROOT = 0.4
"""Part of the time for the first bound, at most."""
PARTS = 4
"""Parts a worker between two rounds of nodes."""


@dataclass
class _State:
    """What is known: the best assignment of the root, and nodes that are open."""

    root: Node
    deadline: float
    workers: int
    open: list[Node] = field(default_factory=list)
    best: tuple[Score, list[int]] | None = None
    search: Search | None = None
    lost: float = math.inf
    """The least bound of nodes that were left without being split."""

    @property
    def ceiling(self) -> float:
        """The least cost known."""
        return self.best[0].cost if self.best is not None and self.best[0].whole else math.inf

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def offer(self, x: list[int]) -> None:
        """Take an assignment of the root if it is better."""
        score = self.root.network.score(x)
        if self.best is None or score < self.best[0]:
            self.best = score, x

    def done(self) -> bool:
        """Whether the time is over, or nothing better can be."""
        return self.late() or self.lower() > self.ceiling - 1 + HALF

    def lower(self) -> float:
        """A bound on what is not yet known."""
        return min([self.lost, *[node.bound for node in self.open]])

    def nodes(self) -> None:
        """Visit nodes: by turns the one of the least bound, and the last one made."""
        chosen: list[Node] = []
        while self.open and len(chosen) < self.workers:
            at = (
                -1
                if len(chosen) % 2
                else min(range(len(self.open)), key=lambda k: (self.open[k].bound, -k))
            )
            node = self.open.pop(at)
            if node.bound <= self.ceiling - 1 + HALF:
                chosen.append(node)
        ceiling, deadline = self.ceiling, self.deadline
        tasks = [lambda node=node: visit(node, ceiling, deadline) for node in chosen]
        for node, seen in zip(chosen, side_by_side(tasks), strict=True):
            self.visited(node, seen)

    def visited(self, node: Node, seen: Visited) -> None:
        """Take over what a visit found."""
        if seen.best is not None:
            self.offer(seen.best)
        if seen.left:
            self.lost = min(self.lost, seen.bound)
        self.open += sorted(seen.children, key=lambda c: -sum(len(k) for k in c.kept))

    def parts(self) -> None:
        """Improve the best assignment by parts."""
        assert self.search is not None and self.best is not None
        if self.search.score != self.best[0]:
            self.search.x, self.search.score = list(self.best[1]), self.best[0]
        parts = self.search.parts(self.workers)
        for part, found in zip(
            parts, side_by_side([self.search.task(part) for part in parts]), strict=True
        ):
            self.search.take(part, found)
        self.best = self.search.score, list(self.search.x)


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
    workers: int | None = None,
    seed: int = 0,
) -> Result:
    """Minimise one component of `problem` under `caps` and the problem's limits.

    Args:
        problem, component, caps, hint, seconds: As every solver has them.
        workers: Processes; None: as many as there are cores for this one.
        seed: Of the search; the same seed finds the same, up to where the clock ends it.

    Raises:
        SolverError: OR-tools is not installed, or what was found breaks the problem.
    """
    began = time.monotonic()
    made = model(problem, component, caps)
    whole = made.network
    keep = supported(whole)
    if keep is None:
        return Result("infeasible", None, 0)
    root = cut(Node(-math.inf, whole, [np.arange(len(c)) for c in whole.costs], None), keep)
    state = _State(
        root._replace(kept=[np.arange(len(c)) for c in root.network.costs]),
        began + seconds,
        workers or len(os.sched_getaffinity(0)),
    )
    seen = visit(state.root, math.inf, began + ROOT * seconds)
    state.visited(state.root, seen)
    assert state.best is not None
    ranks = [np.argsort(values, kind="stable") for values in seen.reduced]
    state.search = Search(state.root.network, list(state.best[1]), ranks, seed)
    while not state.done():
        if state.open:
            state.nodes()
        for _ in range(PARTS):
            if not state.done():
                state.parts()
    return _result(state, made, root, component, caps)


def _result(
    state: _State, made: Model, root: Node, component: int, caps: Mapping[int, int]
) -> Result:
    """What is known, in terms of the problem."""
    lower = state.lower()
    assert state.best is not None
    if not state.best[0].whole:
        if lower == math.inf:
            return Result("infeasible", None, 0)
        return Result("unknown", None, made.constant + math.ceil(lower))
    found = made.assignment(lifted(root, state.best[1]))
    cost = made.problem.accept(found, caps)[component]
    if lower > state.ceiling - 1 + HALF:
        return Result("optimal", found, cost)
    return Result("feasible", found, min(made.constant + math.ceil(lower), cost))
