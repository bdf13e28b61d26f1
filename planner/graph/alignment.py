"""Refines axes that an op needs in multiples of some bytes, if ranks would get other lengths."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from shardwright.planner.graph.axes import Axes, Dim, factors_of, split_minor
from shardwright.planner.graph.graph import Graph
from shardwright.rules.contraction import ALIGNED


def misaligned(graph: Graph, axes: Axes, ranks: int) -> frozenset[tuple[int, int]]:
    """Return (id of an axis, unit) of the axes of `graph` to make products of units, for `align`.

    2880 columns on 16 ranks, in units of 8, become 360 x 8: ranks get 22 or 23 units.
    """
    return frozenset((axis.id, unit) for axis, unit in _misaligned(graph, axes, ranks))


def align(graph: Graph, axes: Axes, ranks: int) -> None:
    """Make axes of `graph` products of units, so that only whole units are sharded."""
    for axis, unit in _misaligned(graph, axes, ranks):
        split_minor(axis, unit)


def _misaligned(graph: Graph, axes: Axes, ranks: int) -> Iterator[tuple[Dim, int]]:
    for op in graph.ops:
        letters, nbytes = ALIGNED.get(op.call.op, ((), 1))
        for letter in letters if axes.rules.get(op.name) is not None else ():
            dim = axes.rule_axes[op.name][letter]
            unit = max(nbytes // graph.tensors[op.inputs[0]].dtype.itemsize, 1)
            for factor in [*factors_of(dim)]:
                need = unit // gcd(unit, dim.size // factor.size)
                uneven = factor.size % need == 0 < factor.size % (need * ranks)
                if 1 < need < factor.size and uneven and not (factor.solid or factor.unshardable):
                    yield factor, need
