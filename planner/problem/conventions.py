"""What is settled by convention, not by its price, as in plans that are written by hand.

Tables of tokens and heads are split by rows; the projections of attention are split.

Split by columns, a table moves half of the bytes: an all-gather of what was looked up, not an
all-reduce; and in a deep model it is small enough to stay replicated within the slack of bytes.
That is some microseconds, and no switch that reduces turns it round (each rank then receives the
whole once and 1/n of it, in a gather all but 1/n of it). But hand-written plans split a table by
vocabulary, as the head is: so do users expect, and tools that read shards. So, where that is
possible, only such states are left to the solvers, which prove the best of those plans. A pin
overrides it; what cannot be had so (a budget, say) is had without.

It is for tables that are looked up by what the model is given, not by positions, and whose columns
are those of the hidden states that blocks hand on whole: there the columns must come together. And
for heads, the linear layers that give the scores of a loss: where experts or depth make them small
beside the rest, the slack of bytes would pay for scores that need not be gathered.

The slack of bytes is not spent on attention either. Where that is small beside the rest, the slack
would pay for all of it on each rank; where keys go through a norm over all heads, for the whole
weight that makes them, which saves a gather and breaks up what belongs together. So where the
cheapest plan has a weight whole whose product gives the heads that attention runs on, or takes
them, the plan is looked for again with all such weights split.
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
from shardwright.planner.solvers.problem import Row
from shardwright.planner.strategies.state import State, mask_of
from shardwright.planner.strategies.states import States

PreferredStates = Mapping[str, frozenset[State]]
"""Parameters, as stored, and the states that a convention wants them in."""


def token_tables(graph: Graph, states: States) -> dict[str, frozenset[State]]:
    """Tables of tokens and heads, as stored, that can be split by rows -> the states that do."""
    stored = {u.used: u.stored for u in graph.uses}
    given, width = _model_inputs(graph), _hidden_axes(graph, states.axes)
    scores = graph.marks.logits
    found: dict[str, frozenset[State]] = {}
    for op in graph.ops if states.ranks > 1 else ():
        rule = states.axes.rules.get(op.name)
        if rule is not None and rule.lookup and op.name in states.replaceable:
            table, tokens = op.inputs[0], op.inputs[1]
            if tokens not in given or not width & _atoms(states.axes, op.outputs[0], -1):
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
    """Weights of products, as stored, that have heads of attention -> the states that are split.

    Over as many ranks as those heads can be, along which axes does not matter.
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
"""What each says; of a parameter that two speak of, the last."""


def follow(
    network: CostFunctionNetwork, preferred: PreferredStates, pinned: Container[str]
) -> list[str]:
    """Leave the parameters that are not pinned only their preferred states; return them."""
    zero = (0,) * len(network.problem.components)
    followed = [name for name in preferred if name not in pinned]
    for name in followed:
        domain = network.states.domain(name)
        rows = [Row((i,), zero) for i, state in enumerate(domain) if state in preferred[name]]
        network.problem.factor(f"preferred {name}", [network.variables[name]], rows)
    return followed


def _heads(graph: Graph, axes: Axes) -> frozenset[int]:
    """Axes of the heads that attention runs on."""
    found: set[int] = set()
    for op in graph.ops:
        if op.call.op in ATTENTION and op.name in axes.rules:
            for name in op.inputs[:3]:  # queries, keys and values
                if len(axes.dims[name]) > 3:
                    found |= _atoms(axes, name, -3)
    return frozenset(found)


def _sub_axis_count(state: State, axes: Container[int] | None = None) -> int:
    """How many sub-axes split some of these axes; of any, without them."""
    return mask_of(frozenset(s for s in state.shards if axes is None or s[1] in axes)).bit_count()


def _model_inputs(graph: Graph) -> set[str]:
    """The inputs of the model, and what is the same but for its shape."""
    moves = sources(graph, moved)
    return {n for name in graph.inputs for n in (name, *nx.ancestors(moves, name))}


def _hidden_axes(graph: Graph, axes: Axes) -> set[int]:
    """Axes of the last dim of hidden states."""
    return set().union(*(_atoms(axes, name, -1) for name in graph.marks.carried))


def _atoms(axes: Axes, name: str, dim: int) -> set[int]:
    return {a.id for a in atoms_of(axes.dims[name][dim])}
