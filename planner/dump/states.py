"""What each tensor could be, and what the plan chose, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.axes import leaves_of


def states_text(layouts: Layouts, names: Mapping[int, str]) -> Iterator[str]:
    """Every tensor with its states in order of their numbers; `*` marks what the plan chose."""
    graph, states = layouts.graph, layouts.states
    yield "# tensors: the states that each may be in; * is the plan's"
    for name in graph.tensors:
        one = graph.one(name)
        chosen = layouts.assignment[name]
        like = f"   (as {one}: like blocks are placed alike)" if one != name else ""
        yield f"{name}{like}"
        for number, state in enumerate(states.domain(name)):
            mark = "*" if state == chosen else " "
            axes = {a.id: names[a.id] for d in states.axes.dims[name] for a in leaves_of(d)}
            over = ", ".join(
                f"{axes.get(a, a)} over {states.sub.text(m)}" for _, a, m in sorted(state.shards)
            )
            placement = str(layouts.placement(name, state, stored=True)) or "scalar"
            yield f"  {mark} {number}: {placement}{f'   [{over}]' if over else ''}"
