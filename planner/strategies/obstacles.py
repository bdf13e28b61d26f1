"""Explains why a dim of a parameter cannot be sharded, from the axis graph."""

from __future__ import annotations

from shardwright.planner.graph.axes import Dim, find, leaves_of
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.states import States

UNUSED = "the traced forward does not use it"
BUFFER = "it is a buffer, and those stay replicated"


def place(op: Op) -> str:
    """Return an op with its module and source line: linear in 'lm_head' (modeling_x.py:12)."""
    return f"{op.call.op} in '{op.module}' ({op.source})"


def obstacle(graph: Graph, states: States, stored: str, dim: int) -> str:
    """Return why dim `dim` of a stored tensor cannot be sharded in any plan."""
    uses = [u for u in graph.uses if u.stored == stored]
    if all(u.is_buffer for u in uses):
        return BUFFER
    read = {n for op in graph.ops for n in op.inputs} | {b.source for b in graph.boundaries}
    if not any(u.used in read for u in uses):
        return UNUSED
    if (stored, dim) in graph.marks.fixed:
        return "the code gives its size as a bare number"
    tree = states.axes.dims[stored][dim]
    for op, text in states.axes.conflicts:
        near = (d for n in (*op.inputs, *op.outputs) for d in states.axes.dims[n])
        if not _ids(tree).isdisjoint(i for d in near for i in _ids(d)):
            return f"at {place(op)}: {text}"
    size, atoms = graph.tensors[stored].shape[dim], list(leaves_of(tree))
    if size < states.ranks:
        return f"its size is {size}, and there are {states.ranks} ranks"
    if any(name == stored and {d for d, *_ in cut} == {dim} for name, cut in states.forbidden):
        return "the model's code does not run with such a sharding (tried on meta)"
    if any(a.unshardable for a in atoms):
        return "its size is tied to one that is known only at run time"
    sizes = [a.size for a in atoms]
    parts = " and ".join(map(str, dict.fromkeys(sizes)))
    return f"the code takes it apart into {parts}, none of which {states.ranks} ranks could share"


def _ids(dim: Dim) -> set[int]:
    return {find(dim).id} | {a.id for a in leaves_of(dim)}
