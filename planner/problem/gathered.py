"""Finds weights that no op can use sharded: they may be stored sharded and gathered at each use.

If a module multiplies with a matrix in its own code and then applies an op that is not linear,
there is no module boundary nearby to redistribute at. If many weights are like that, each rank may
hold a shard of them, and all-gather the full weight at each use; it keeps its part of the gradient.
This is never done for weights that ops can use sharded, for weights read by modules that branch on
data (all ranks must read alike), and for weights written in place (a gathered tensor is a copy).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.planner.contract.names import grouped
from shardwright.planner.graph.graph import Graph
from shardwright.planner.strategies.states import States


def unsplittable(
    graph: Graph, states: States, possible: Mapping[str, bool], least: float
) -> frozenset[str]:
    """Return the stored matrices that no solution shards although their sizes allow it.

    Args:
        graph: The traced model.
        states: Domains of the tensors.
        possible: Per tensor, whether any solution shards it.
        least: Return none unless their bytes exceed this share of all bytes divided by the ranks.
    """
    readers = grouped((name, op.name) for op in graph.ops for name in op.inputs)
    sizes: dict[str, int] = {}
    read: dict[str, list[str]] = {}
    written = {u.stored for u in graph.uses if u.used in graph.marks.overwritten}
    for use in graph.uses:
        tensor = graph.tensors[use.stored]
        sizes[use.stored] = graph.times(use.stored) * prod(tensor.shape) * tensor.dtype.itemsize
        read.setdefault(use.stored, []).extend(readers.get(use.used, ()))
    found = {
        name
        for name, ops in read.items()
        if ops and all(states.axes.rules.get(op) is not None for op in ops)
        if name not in written and not possible.get(name, True)
        if len(graph.tensors[name].shape) > 1 and states.splits(name) and name not in states.rigid
    }
    enough = sum(sizes[n] for n in found) * states.ranks > least * sum(sizes.values())
    return frozenset(found if enough else ())
