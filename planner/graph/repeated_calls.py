"""Modules that are called more than once: what may happen to a slot of theirs in each call.

The runtime has one change of placement for a slot and a number of dims. So calls make the same
change, or none at all: a dropout for attention weights and for the output may leave heads split.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.planner.graph.axes import Axes, Dim, leaves_of
from shardwright.planner.graph.graph import Boundary, Graph, Slot


def repeats(graph: Graph) -> Iterator[tuple[Boundary, Boundary]]:
    """The first boundary of each slot with each later one."""
    first: dict[Slot, Boundary] = {}
    for boundary in graph.boundaries:
        before = first.setdefault(graph.slot(boundary), boundary)
        if (before.source, before.target) != (boundary.source, boundary.target):
            yield before, boundary


class Sizes:
    """Which sizes a plan states: those of parameters; all others it leaves open."""

    def __init__(self, graph: Graph, axes: Axes) -> None:
        self.graph, self.axes = graph, axes
        self.known = {a.id for u in graph.uses for d in axes.dims[u.stored] for a in leaves_of(d)}
        # A table of positions has the length of the sequence, too.
        given = ((n, k, d) for n in graph.inputs for k, d in enumerate(axes.dims[n]))
        self.known -= {
            a.id for n, k, d in given if (n, k) not in graph.marks.sized for a in leaves_of(d)
        }

    def same(self, a: str, b: str) -> bool:
        """Whether one change of placement, as a plan states it, is for both tensors."""
        return all(
            x.size == y.size or not (self._stated(x) or self._stated(y))
            for x, y in zip(self.axes.dims[a], self.axes.dims[b], strict=True)
        )

    def _stated(self, dim: Dim) -> bool:
        return all(a.id in self.known for a in leaves_of(dim))
