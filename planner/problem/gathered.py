"""Weights that no op can use in parts: held in parts all the same, and gathered as they are read.

A matrix that a module multiplies with in its own code, and goes on with what is no sum, has no
boundary near it where parts could be put together. Where such weights are many, each rank may hold
a part of them, and gather the whole each time that it is read: an all-gather of the weight, not of
activations; of the gradient a rank takes its part. What ops can use in parts is never gathered so,
nor is what modules read that branch on data, for all ranks must read alike, nor what is written in
place: what is gathered is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.planner.graph.graph import Graph
from shardwright.planner.strategies.states import States


def unsplittable(
    graph: Graph, states: States, possible: Mapping[str, bool], least: float
) -> frozenset[str]:
    """Matrices, as stored, that no solution splits though their sizes allow it.

    Args:
        graph: The traced model.
        states: Domains.
        possible: Per tensor, whether any solution splits it.
        least: The share of what a rank holds, were all split, that they must be together.
    """
    readers: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op.name)
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
        if len(graph.tensors[name].shape) > 1 and len(states.domain(name)) > 1
    }
    enough = sum(sizes[n] for n in found) * states.ranks > least * sum(sizes.values())
    return frozenset(found if enough else ())
