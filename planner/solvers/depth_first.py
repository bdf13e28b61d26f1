"""Depth-first search under the bounds of `buckets.py`, with backjumping and remembered nodes.

Three things keep the tree small:

- A value is tried only while the bounds of `buckets.py` stay within the limits: the objective below
  the incumbent, every cap, and the weighed sums of `multipliers.py` (R. Marinescu and R. Dechter,
  "AND/OR branch-and-bound search for combinatorial optimization in graphical models", Artificial
  Intelligence 173, 2009, for static mini-bucket bounds in search).
- A dead end jumps back to the deepest variable that has part in it (conflict-directed backjumping,
  with forward checking: P. Prosser, "Hybrid algorithms for the constraint satisfaction problem",
  Computational Intelligence 9, 1993). Where a limit is the cause, these are the variables of all
  mini-buckets that raised the bound: the others' differences cannot be less than the zero counted.
- A node is left when one with the same values of all variables that still matter was searched
  before, at no greater costs. Identical layers under a budget would be a knapsack with its
  symmetries otherwise; the costs kept per context are Pareto fronts, as in multi-objective bucket
  elimination (E. Rollon and J. Larrosa, "Bucket elimination for multiobjective optimization
  problems", Journal of Heuristics 12, 2006).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from shardwright.planner.solvers.buckets import Buckets
from shardwright.planner.solvers.incumbent import Incumbent
from shardwright.planner.solvers.multipliers import Weights, dot
from shardwright.planner.solvers.tables import Key, Vector

NODES = 20_000_000
"""Nodes after which the search gives up."""
FRONTS = 1_000_000
"""Cost vectors that are remembered, at most."""


@dataclass
class _Node:
    """A level of the path: values left to try, the bounds so far, and who is to blame."""

    choices: list[tuple[int, Vector]]
    blame: int = 0
    trail: list[tuple[int, int, int]] = field(default_factory=list)


class DepthFirst:
    """The search proper. Sets of levels are bit masks: bit i is level i."""

    def __init__(
        self,
        buckets: Buckets,
        weights: Sequence[Weights],
        incumbent: Incumbent,
        hint: Sequence[int] | None,
    ) -> None:
        self.buckets, self.weights, self.incumbent, self.hint = buckets, weights, incumbent, hint
        count = len(buckets.order)
        self.masks = [[sum(1 << k for k in m.above) for m in minis] for minis in buckets.levels]
        self.values = [0] * count
        self.bounds: list[Vector] = [buckets.root] * (count + 1)
        self.raisers: list[list[int]] = [[0] * len(weights)] * (count + 1)
        self.domains: list[int] = []
        self.reasons: list[int] = []
        self.watched: list[list[tuple[int, int, tuple[int, ...], dict[Key, int]]]] = [
            [] for _ in range(count)
        ]
        for level, found in enumerate(buckets.split):
            for table in found:
                self._watch(level, table.scope[:-1], table.rows)
        self.contexts = self._contexts()
        self.fronts: dict[tuple[int, Key], list[Vector]] = {}
        self.limits: list[int | None] = []
        self.goal: int | None = None
        self.room = self.nodes = 0

    def _watch(self, level: int, above: tuple[int, ...], rows: Mapping[Key, Vector]) -> None:
        """Forward checking of a table: once all variables but its deepest are set, prune that."""
        if not above:
            return
        allowed: dict[Key, int] = {}
        for key in rows:
            allowed[key[:-1]] = allowed.get(key[:-1], 0) | 1 << key[-1]
        mask = sum(1 << k for k in above)
        self.watched[above[-1]].append((level, mask, above, allowed))

    def _contexts(self) -> list[tuple[int, tuple[int, ...]] | None]:
        """Levels above each level that matter from there on; None where all of them do."""
        out: list[tuple[int, tuple[int, ...]] | None] = []
        mask = 0
        for level in reversed(range(len(self.masks))):
            for m in self.masks[level]:
                mask |= m
            mask &= (1 << level) - 1
            levels = tuple(k for k in range(level) if mask >> k & 1)
            out.append((mask, levels) if len(levels) < level else None)
        return out[::-1]

    def _tighten(self) -> None:
        """Set the limits to what reaches the goal and is better than the incumbent."""
        goals = [] if self.goal is None else [self.goal]
        if self.incumbent.assignment is not None:
            goals.append(self.incumbent.cost - 1)
        limits = (min(goals, default=0), *self.incumbent.caps)
        self.limits = [dot(w, limits) if goals or not w[0] else None for w in self.weights]

    def _broken(self, bounds: Vector) -> int | None:
        """The first limit that `bounds` are over."""
        for i, limit in enumerate(self.limits):
            if limit is not None and bounds[i] > limit:
                return i
        return None

    def _enter(self, level: int) -> _Node:
        """Choices at `level`, best bound last, and the blame for those that are out."""
        node = _Node([])
        bounds, raisers = self.bounds[level], self.raisers[level]
        if self._seen(level, node):
            return node
        tables = [
            m.rows[tuple([self.values[k] for k in m.above])] for m in self.buckets.levels[level]
        ]
        masks, domain = self.masks[level], self.domains[level]
        full = (1 << self.buckets.sizes[level]) - 1
        if domain != full:
            node.blame |= self.reasons[level]
        for table, mask in zip(tables, masks, strict=True):
            if len(table) < self.buckets.sizes[level]:
                node.blame |= mask
        for x in tables[0]:
            if not domain >> x & 1 or not all(x in t for t in tables):
                continue
            new = bounds
            for table in tables:
                new = tuple(map(add, new, table[x]))
            broken = self._broken(new)
            if broken is None:
                node.choices.append((x, new))
                continue
            node.blame |= raisers[broken]
            for table, mask in zip(tables, masks, strict=True):
                if table[x][broken]:
                    node.blame |= mask
        wanted = self.hint[self.buckets.order[level]] if self.hint is not None else None
        main = next((i for i in reversed(range(len(self.weights))) if self.weights[i][0]), 0)
        node.choices.sort(key=lambda c: (c[1][main], c[1][0], c[0] != wanted, c[0]), reverse=True)
        return node

    def _seen(self, level: int, node: _Node) -> bool:
        """Whether a node that is as good in every way was searched; remembers this one if not."""
        context = self.contexts[level]
        if context is None:
            return False
        mask, levels = context
        count = 1 + len(self.incumbent.caps)
        costs = self.bounds[level][:count]
        key = (level, tuple([self.values[k] for k in levels]))
        front = self.fronts.get(key, [])
        for old in front:
            if all(a <= b for a, b in zip(old, costs, strict=True)):
                node.blame = mask
                for raisers in self.raisers[level][:count]:
                    node.blame |= raisers
                return True
        if self.room > 0:
            kept = [f for f in front if any(a < b for a, b in zip(f, costs, strict=True))]
            self.room -= 1 + len(kept) - len(front)
            self.fronts[key] = [*kept, costs]
        return False

    def _take(self, level: int, node: _Node, x: int, bounds: Vector) -> int | None:
        """Assign; the blame if that leaves a variable without a value, else None."""
        self.values[level] = x
        self.bounds[level + 1] = bounds
        raisers = list(self.raisers[level])
        for m, mask in zip(self.buckets.levels[level], self.masks[level], strict=True):
            difference = m.rows[tuple([self.values[k] for k in m.above])][x]
            for i, d in enumerate(difference):
                if d:
                    raisers[i] |= mask | 1 << level
        self.raisers[level + 1] = raisers
        for target, mask, above, allowed in self.watched[level]:
            left = self.domains[target] & allowed.get(tuple([self.values[k] for k in above]), 0)
            if left == self.domains[target]:
                continue
            node.trail.append((target, self.domains[target], self.reasons[target]))
            self.domains[target] = left
            self.reasons[target] |= mask
            if not left:
                return self.reasons[target]
        return None

    def _undo(self, node: _Node) -> None:
        while node.trail:
            target, self.domains[target], self.reasons[target] = node.trail.pop()

    def run(self, goal: int | None, deadline: float) -> bool:
        """Search until nothing better up to `goal` is left; False where a budget ends it before."""
        self.goal, self.room = goal, FRONTS
        self.fronts.clear()
        self._tighten()
        if self._broken(self.buckets.root) is not None:
            return True
        last = len(self.buckets.order) - 1
        if last < 0:
            self.incumbent.offer(())
            return True
        self.domains = [(1 << size) - 1 for size in self.buckets.sizes]
        self.reasons = [0] * len(self.domains)
        path = [self._enter(0)]
        while path:
            level, node = len(path) - 1, path[-1]
            self._undo(node)
            if not node.choices:
                if not self._jump(path):
                    return True
                continue
            x, bounds = node.choices.pop()
            broken = self._broken(bounds)  # the incumbent may be better than when we came here
            self.nodes += 1
            if self.nodes > NODES or (self.nodes % 256 == 0 and time.monotonic() > deadline):
                return False
            blame = self._take(level, node, x, bounds)
            if broken is not None:
                node.blame |= self.raisers[level + 1][broken] & ~(1 << level)
            elif blame is not None:
                node.blame |= blame & ~(1 << level)
            elif level < last:
                path.append(self._enter(level + 1))
            else:
                self._found()
                node.blame |= self.raisers[level + 1][0] & ~(1 << level)
        return True

    def _jump(self, path: list[_Node]) -> bool:
        """Go back to the deepest level to blame; False where there is none: all is searched."""
        blame = path.pop().blame
        while path and not blame >> (len(path) - 1) & 1:
            self._undo(path.pop())
        if path:
            path[-1].blame |= blame & ~(1 << (len(path) - 1))
        return bool(path)

    def _found(self) -> None:
        assignment = [0] * len(self.values)
        for v, x in zip(self.buckets.order, self.values, strict=True):
            assignment[v] = x
        self.incumbent.offer(tuple(assignment))
        self._tighten()
