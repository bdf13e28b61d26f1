"""Find why parameters are sharded together: the shortest chain of ops that ties their dims.

Two dims share an axis because the rule of an op says so (`axes.py`). A chain of ops from one
parameter to another explains why neither can be sharded without the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import networkx as nx

from shardwright.planner.graph.axes import Axes, atoms_of
from shardwright.planner.graph.graph import Graph, Op, Slot
from shardwright.rules.notation import letters

Place = tuple[str, int]
"""A tensor and the number of a dim."""

OP = 1
"""Weight of an edge from a dim to an axis of an op's rule."""


def ties(graph: Graph, axes: Axes, start: Place, atoms: Iterable[int]) -> dict[Place, list[Op]]:
    """Return the shortest chain of ops from a parameter's dim to each parameter dim that shares it.

    The chain is empty for the dim itself and for tied parameters. In a folded graph a chain moves
    from one copy of a block to another only if there is no other path.

    Args:
        graph: The traced model.
        axes: Its axes.
        start: A stored parameter and the number of a dim.
        atoms: Ids of atoms of that dim.
    """
    ops = {op.name: op for op in graph.ops}
    stored = {use.stored for use in graph.uses}
    found: dict[Place, tuple[float, list[Op]]] = {}
    for atom in atoms:
        near = having(graph, axes, atom)
        for place, path in nx.single_source_dijkstra_path(near, start).items():
            if place[0] in stored:
                chain = [ops[name] for name, at in path if isinstance(at, str)]
                way = nx.path_weight(near, path, "weight"), chain
                found[place] = min(found.get(place, way), way, key=lambda way: way[0])
    return {place: chain for place, (_, chain) in found.items()}


def having(graph: Graph, axes: Axes, atom: int) -> nx.Graph:
    """Return the graph of tensor dims and op axes (name, letter) that contain this atom."""

    def has(name: str, at: int | str) -> bool:
        dim = axes.dims[name][at] if isinstance(at, int) else axes.rule_axes[name][at]
        return any(a.id == atom for a in atoms_of(dim))

    out, far = nx.Graph(), 2 * OP * len(graph.ops) + 1
    for one, other, copies in _same(graph):
        length = far if copies else 0
        for i in range(len(graph.tensors[one].shape)):
            if has(one, i) and has(other, i):
                out.add_edge((one, i), (other, i), weight=length)
    for op in graph.ops:
        for name, dims in axes.sides(op):
            for i, expr in enumerate(dims):
                for letter in letters(expr):
                    if has(name, i) and has(op.name, letter):
                        out.add_edge((name, i), (op.name, letter), weight=OP)
    return out


def _same(graph: Graph) -> Iterator[tuple[str, str, bool]]:
    """Yield pairs of tensors with the same axes, and whether they are only copies of each other."""
    yield from ((u.stored, u.used, False) for u in graph.uses)
    yield from ((b.source, b.target, False) for b in graph.boundaries)
    yield from ((one, name, True) for name, one in graph.alike.items())
    first: dict[Slot, str] = {}
    for boundary in graph.boundaries:
        one = first.setdefault(graph.slot(boundary), boundary.source)
        if graph.tensors[one].shape == graph.tensors[boundary.source].shape:
            yield one, boundary.source, True
