"""Conventions: placements that are set as in hand-written plans, not by price.

Token tables (embeddings and language-model heads) are sharded by rows. The projections of attention
are sharded.

A table that is sharded by columns moves half of the bytes: an all-gather of what was looked up
instead of an all-reduce. In a deep model a table is also small enough to stay replicated within the
slack of bytes. This saves some microseconds, and a switch that reduces does not change that: with
it each rank receives the full tensor once plus 1/n of it; in an all-gather, all but 1/n of it. But
hand-written plans shard a table by vocabulary, like the head. Users expect that, and so do tools
that read shards. Therefore the solvers get only these states where possible, and prove the best of
those plans. A pin overrides the convention. If no plan is possible with it (within a budget, say),
it is dropped.

The convention is for tables that are looked up by inputs of the model, not by positions, and whose
columns are those of the hidden states that blocks pass on replicated: there the columns must be
gathered. It is also for heads, the linear layers that give the logits of a loss: in models whose
experts or depth make them relatively small, the slack of bytes would pay for logits that need no
gather.

The slack of bytes is not spent on attention either. If attention is relatively small, the slack
would pay for replicating all of it. If keys go through a norm over all heads, the slack would pay
for replicating the weight that makes them, which saves a gather but separates weights that belong
together. So if the cheapest plan replicates a weight whose product makes or takes the heads of
attention, the search solves again with all those weights sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import networkx as nx

from shardwright.planner.graph.as_networkx import sources
from shardwright.planner.graph.axes import Axes, atoms_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.kv_cache import ATTENTION
from shardwright.planner.graph.views import moved
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.strategies.state import State, mask_of
from shardwright.planner.strategies.states import States

PreferredStates = Mapping[str, frozenset[State]]
"""Stored parameter -> the states that a convention allows."""


def token_tables(graph: Graph, states: States) -> dict[str, frozenset[State]]:
    """Return the stored token tables and heads that can be sharded by rows, with these states."""
    stored = {u.used: u.stored for u in graph.uses}
    given, axes = _model_inputs(graph), states.axes
    hidden = set[int]().union(*(_atoms(axes, name, -1) for name in graph.marks.carried))
    scores = graph.marks.logits
    found: dict[str, frozenset[State]] = {}
    for op in graph.ops if states.ranks > 1 else ():
        rule = axes.rules.get(op.name)
        if rule is not None and rule.lookup and op.name in states.replaceable:
            table, tokens = op.inputs[0], op.inputs[1]
            if tokens not in given or not hidden & _atoms(axes, op.outputs[0], -1):
                continue
        elif op.call.op == "linear" and op.outputs[0] in scores and op.inputs[1] in stored:
            table = op.inputs[1]
        else:
            continue
        rows = (s for s in states.domain(stored[table]) if {d for d, _, _ in s.shards} == {0})
        by_rows = frozenset(s for s in rows if states.covered(table, s.shards) == states.sub.full)
        if by_rows:
            found[stored[table]] = by_rows
    return found


def projections(graph: Graph, states: States) -> dict[str, frozenset[State]]:
    """Return the stored weights of products with heads of attention, with their sharded states.

    The states are sharded over as many sub-axes as the heads can be, along any axes.
    """
    heads = _heads(graph, states.axes)
    stored = {u.used: u.stored for u in graph.uses}
    found: dict[str, frozenset[State]] = {}
    for op in graph.ops if heads and states.ranks > 1 else ():
        rule = states.axes.rules.get(op.name)
        for name in op.inputs if rule is not None and rule.sum else ():
            if name in stored and len(graph.tensors[name].shape) > 1:
                domain = states.domain(stored[name])
                most = max(_sub_axis_count(s, heads) for s in domain)
                if most:
                    found[stored[name]] = frozenset(s for s in domain if _sub_axis_count(s) >= most)
    return found


TABLES, PROJECTIONS = "tables of tokens by rows", "attention split"
CONVENTIONS: dict[str, Callable[[Graph, States], PreferredStates]] = {
    PROJECTIONS: projections,
    TABLES: token_tables,
}
"""Name -> the states that the convention prefers. For a parameter in two, the last one counts."""


def follow(
    network: CostFunctionNetwork, preferred: PreferredStates, pinned: Container[str]
) -> list[str]:
    """Restrict the parameters that are not pinned to their preferred states, and return them."""
    followed = [name for name in preferred if name not in pinned]
    for name in followed:
        network.allow(f"preferred {name}", name, preferred[name].__contains__)
    return followed


def _heads(graph: Graph, axes: Axes) -> frozenset[int]:
    """Return the axes of the attention heads."""
    found: set[int] = set()
    for op in graph.ops:
        if op.call.op in ATTENTION and op.name in axes.rules:
            for name in op.inputs[:3]:  # queries, keys and values
                if len(axes.dims[name]) > 3:
                    found |= _atoms(axes, name, -3)
    return frozenset(found)


def _sub_axis_count(state: State, axes: Container[int] | None = None) -> int:
    """Return how many sub-axes shard any of these axes; any axis, if `axes` is None."""
    return mask_of(frozenset(s for s in state.shards if axes is None or s[1] in axes)).bit_count()


def _model_inputs(graph: Graph) -> set[str]:
    """Return the inputs of the model, and tensors that are views or copies of them."""
    moves = sources(graph, moved)
    return {n for name in graph.inputs for n in (name, *nx.ancestors(moves, name))}


def _atoms(axes: Axes, name: str, dim: int) -> set[int]:
    return {a.id for a in atoms_of(axes.dims[name][dim])}
