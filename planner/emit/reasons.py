"""Gives the reasons why large parameters stay replicated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from shardwright.planner.contract.plan_file import Replicated
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.prediction import whole_bytes
from shardwright.planner.graph.graph import Use
from shardwright.planner.strategies.obstacles import BUFFER, UNUSED, obstacle, place

LARGE = 0.01
"""A parameter is large if it has at least this share of all bytes."""


def replicated_parameters(
    layouts: Layouts,
    possible: Mapping[str, bool],
    pinned: Collection[str] = (),
    failed: Mapping[str, str] = MappingProxyType({}),
    unread: Callable[[Use], str] = lambda use: UNUSED,
) -> list[Replicated]:
    """Return the large parameters that every rank holds, each with the reason.

    Args:
        layouts: The plan's layouts.
        possible: Per stored tensor, whether any plan could shard it.
        pinned: Stored tensors that the user pinned.
        failed: Tensors with a split that failed a dry run -> the error.
        unread: Returns the reason for a parameter that no op of the graph reads.
    """
    graph = layouts.graph
    read = {n for op in graph.ops for n in op.inputs}
    idle = {u.stored for u in graph.uses} - {u.stored for u in graph.uses if u.used in read}
    sizes = {u.stored: whole_bytes(graph, u.stored) for u in graph.uses}
    total = sum(sizes.values())
    found: dict[str, Replicated] = {}
    for use in graph.uses:
        if (
            layouts.assignment[use.stored].shards
            or use.stored in layouts.spread
            or sizes[use.stored] < LARGE * total
            or use.stored in found
        ):
            continue
        if use.stored in pinned:
            reason = "a pin asks for it"
        elif use.used in failed and not possible.get(use.stored):
            reason = f"the model's own code fails if it is sharded: {failed[use.used]}"
        elif use.stored in idle and not possible.get(use.stored):
            reason = unread(use)
        else:
            reason = reason_of(use, layouts, possible)
        found[use.stored] = Replicated(parameter=use.fqn, bytes=sizes[use.stored], reason=reason)
    return sorted(found.values(), key=lambda w: (-w.bytes, w.parameter))


def reason_of(use: Use, layouts: Layouts, possible: Mapping[str, bool]) -> str:
    """Return why a parameter stays replicated; `possible` is as for `replicated_parameters`."""
    states, graph = layouts.states, layouts.graph
    if possible.get(use.stored):
        return "sharding it would cost more time in collectives than its bytes are worth"
    used = {u.used for u in graph.uses if u.stored == use.stored}
    ops = [op for op in graph.ops if used & set(op.inputs)]
    if not ops:
        return UNUSED
    if use.is_buffer and use.stored in states.rigid:
        return BUFFER
    for op in ops:
        if states.axes.rules.get(op.name) is None:
            return f"{place(op)} has no rule"
        for conflict, text in states.axes.conflicts:
            if conflict is op:
                return f"{place(op)}: {text}"
    if not states.splits(use.stored):
        dims = range(len(graph.tensors[use.stored].shape))
        why = dict.fromkeys(obstacle(graph, states, use.stored, dim) for dim in dims)
        return f"{states.ranks} ranks could share none of its dims: {'; '.join(why)}"
    return (
        f"used by {place(ops[0])}; however it is sharded, redistributions at module boundaries "
        "cannot make the outputs replicated"
    )
