"""Convert the graph to networkx, for reachability, paths, components and drawing."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from shardwright.planner.graph.graph import Graph, Op


def as_networkx(graph: Graph) -> nx.DiGraph:
    """Return a directed graph of tensors, uses, ops and boundaries, in execution order.

    A tensor's node is its name. The other nodes are ("use", tensor that the module sees),
    ("op", name) and ("boundary", target tensor). All nodes have the attributes `kind` ("tensor",
    "use", "op" or "boundary"), `call` (the ATen op, the parameter's name or the side and slot),
    `module` and `source` (the line of code). Attributes are strings; empty if they do not apply.
    """
    out = nx.DiGraph()
    for name in graph.tensors:
        out.add_node(name, kind="tensor", call="", module="", source="")
    for use in graph.uses:
        module, _, key = use.fqn.rpartition(".")
        node = "use", use.used
        out.add_node(node, kind="use", call=key, module=module, source="")
        nx.add_path(out, (use.stored, node, use.used))
    for op in graph.ops:
        node = "op", op.name
        out.add_node(node, kind="op", call=op.call.op, module=op.module, source=op.source)
        out.add_edges_from((name, node) for name in op.inputs)
        out.add_edges_from((node, name) for name in op.outputs)
    for b in graph.boundaries:
        node, call = ("boundary", b.target), f"{b.side} {b.slot}".strip()
        out.add_node(node, kind="boundary", call=call, module=b.module, source="")
        nx.add_path(out, (b.source, node, b.target))
    return out


def sources(graph: Graph, operand: Callable[[Op, str], str | None]) -> nx.DiGraph:
    """Return a graph with an edge from each tensor to the tensor that it comes from.

    `operand` returns the operand that a result of an op comes from, or None. The attribute `op` of
    an edge is the op, or None for a boundary. A tensor has at most one source, so its descendants
    form a chain.
    """
    out = nx.DiGraph()
    out.add_nodes_from(graph.tensors)
    for op in graph.ops:
        for name in op.outputs:
            if (source := operand(op, name)) is not None:
                out.add_edge(name, source, op=op)
    out.add_edges_from(((b.target, b.source) for b in graph.boundaries), op=None)
    return out
