"""Where tensors come from, as a graph of networkx."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from shardwright.planner.graph.graph import Graph, Op


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
