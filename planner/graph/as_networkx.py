"""The graph for networkx, which has the algorithms: reachability, paths, components, drawing."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from shardwright.planner.graph.graph import Graph, Op


def as_networkx(graph: Graph) -> nx.DiGraph:
    """Tensors, and what takes and makes them, in the order in which they come.

    A tensor is a node by its name, the rest are ("use", tensor as its module sees it), ("op", name)
    and ("boundary", tensor behind it). All have the attributes `kind` ("tensor" and those three),
    `call` (what it does in a word: the ATen op, the side of a module), `module` and `source`, the
    line of code; they are texts, and empty where there is nothing to say.
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
    """From each tensor to the one that it comes from, by a boundary or by its op.

    `operand` says which operand of an op a result comes from, if any. An edge has the `op`, or None
    for a boundary. A tensor has one source at most: its descendants are a chain.
    """
    out = nx.DiGraph()
    out.add_nodes_from(graph.tensors)
    for op in graph.ops:
        for name in op.outputs:
            if (source := operand(op, name)) is not None:
                out.add_edge(name, source, op=op)
    out.add_edges_from(((b.target, b.source) for b in graph.boundaries), op=None)
    return out
