"""What each tensor could be, and what was chosen, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.axes import leaves_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.strategies.states import States


def states_text(
    graph: Graph, states: States, chosen: Layouts | None, names: Mapping[int, str]
) -> Iterator[str]:
    """Every tensor with its states in order of their numbers; `*` marks the chosen one.

    Args:
        graph: The traced model.
        states: The domains of its tensors.
        chosen: What was chosen, if there was a solution.
        names: Axis id -> its name.
    """
    yield "# tensors: the states that each may be in; * is what was chosen"
    layouts = chosen or Layouts(graph, states, {})
    for name in graph.tensors:
        one = graph.one(name)
        yield f"{name}{f'   (as {one}: like blocks are placed alike)' if one != name else ''}"
        state = chosen.assignment[name] if chosen else None
        axes = {a.id: names[a.id] for d in states.axes.dims[name] for a in leaves_of(d)}
        for number, each in enumerate(states.domain(name)):
            over = ", ".join(
                f"{axes.get(a, a)} over {states.sub.text(m)}" for _, a, m in sorted(each.shards)
            )
            placement = str(layouts.placement(name, each, stored=True)) or "scalar"
            mark = "*" if each == state else " "
            yield f"  {mark} {number}: {placement}{f'   [{over}]' if over else ''}"
