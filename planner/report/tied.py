"""Which parameters must be split together, and the ops that tie them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.ties import ties
from shardwright.planner.graph.views import is_move


@dataclass(frozen=True)
class Link:
    """An op of a chain that ties two parameters together; one that `moves` computes nothing."""

    op: str
    module: str
    source: str
    moves: bool


def tied_to(plan: Plan, layouts: Layouts, fqn: str, dim: int) -> dict[str, list[Link]]:
    """The parameters that have the axes along which a dim of one is split: "a.weight, dim 0".

    With each the shortest chain of ops to it. Of parameters of like layers the nearest counts.

    Args:
        plan: What splits it.
        layouts: Graph and axes of the model.
        fqn: The parameter.
        dim: The number of its dim.
    """
    graph, states = layouts.graph, layouts.states
    stored = {u.fqn: u.stored for u in graph.uses if not u.is_buffer}
    start = stored[fqn]
    chains = ties(graph, states.axes, (start, dim), _split(plan, layouts, fqn, start))
    found: dict[str, list[Link]] = {}
    for other, name in stored.items():
        if name == start or pattern(other) == pattern(fqn):
            continue
        for i in range(len(graph.tensors[name].shape)):
            if (name, i) in chains:
                links = [
                    Link(op.call.op, op.module, op.source, is_move(op.call))
                    for op in chains[name, i]
                ]
                key = f"{pattern(other)}, dim {i}"
                found[key] = min(found.get(key, links), links, key=len)
    return dict(sorted(found.items()))


def _split(plan: Plan, layouts: Layouts, fqn: str, stored: str) -> list[int]:
    """The axes along which the plan splits a parameter: those of the state that it writes so."""
    owner, _, key = fqn.rpartition(".")
    spec = plan.module(owner)
    text = spec.parameters[key].placement if spec else ""
    domain = layouts.states.domain(stored)
    found = (s for s in domain if str(layouts.placement(stored, s, stored=True)) == text)
    return sorted({a for state in found for _, a, _ in state.shards})
