"""Slots of modules that are called more than once.

The runtime keeps one reshard per slot and number of dims. Each call therefore makes the same
reshard or none: a dropout module that is used for attention weights and for the output may leave
heads sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.planner.graph.axes import Axes, Dim, leaves_of
from shardwright.planner.graph.graph import Boundary, Graph, Slot


def repeats(graph: Graph) -> Iterator[tuple[Boundary, Boundary]]:
    """Yield the first boundary of each slot with each later one."""
    first: dict[Slot, Boundary] = {}
    for boundary in graph.boundaries:
        before = first.setdefault(graph.slot(boundary), boundary)
        if (before.source, before.target) != (boundary.source, boundary.target):
            yield before, boundary


class Sizes:
    """The sizes that a plan states: sizes of parameters. All other sizes stay open."""

    def __init__(self, graph: Graph, axes: Axes) -> None:
        self.graph, self.axes = graph, axes
        self.known = {a.id for u in graph.uses for d in axes.dims[u.stored] for a in leaves_of(d)}
        # The length of a position table is also a sequence length: input sizes are not known.
        given = ((n, k, d) for n in graph.inputs for k, d in enumerate(axes.dims[n]))
        self.known -= {
            a.id for n, k, d in given if (n, k) not in graph.marks.sized for a in leaves_of(d)
        }

    def same(self, a: str, b: str) -> bool:
        """Return whether one reshard, as a plan states it, applies to both tensors."""
        return all(
            x.size == y.size or not (self._stated(x) or self._stated(y))
            for x, y in zip(self.axes.dims[a], self.axes.dims[b], strict=True)
        )

    def _stated(self, dim: Dim) -> bool:
        return all(a.id in self.known for a in leaves_of(dim))
