"""The state of a tensor as integers: one for each of its axes, one for each sub-axis.

The integer of an axis is the set of sub-axes that split it, as a mask: 0 where it is whole, and of
two sets of which one holds the other the larger is the larger number. The integer of a sub-axis
says what is Partial over it. A state and its integers say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.names import axis_names, places, tensor_names
from shardwright.planner.solvers.problem import Part
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States

NOTHING, VALUE, GRADIENT = 0, 1, 2
"""What is Partial over a sub-axis. Both would be their sum, though no rule gives that."""


def axis_variables(graph: Graph, states: States) -> dict[str, tuple[Part, ...]]:
    """Tensor that has a variable -> the parts of its states, of those that differ between states.

    `mlp.up_proj.weight[0]` is the axis at dim 0 of that parameter, `mlp.down_proj.weight[1:
    mlp.up_proj.weight[0]]` the same axis at dim 1 of another one, `mlp out 0 partial on tp` what
    the output of a module is over that mesh dim.
    """
    axes = axis_names(graph, states.axes)
    out = {}
    for name, title in tensor_names(graph).items():
        domain = states.domain(name)
        out[name] = (
            *_split(title, name, domain, states.axes, axes),
            *_partial(title, domain, states),
        )
    return out


def _split(
    title: str, name: str, domain: Sequence[State], axes: Axes, names: Mapping[int, str]
) -> list[Part]:
    """For each axis of a tensor that any state splits, over which sub-axes."""
    found = sorted({(d, a) for state in domain for d, a, _ in state.shards})
    if not found:
        return []
    where = {(d, a): place for d, a, place in places(axes.dims[name])}
    out = []
    for d, axis in found:
        place = where.get((d, axis), f"{d}")
        own = f"{title}[{place}]"
        label = own if names.get(axis, own) == own else f"{title}[{place}: {names[axis]}]"
        masks = [sum(m for e, a, m in s.shards if (e, a) == (d, axis)) for s in domain]
        out.append(Part(label, masks))
    return out


def _partial(title: str, domain: Sequence[State], states: States) -> list[Part]:
    """For each sub-axis over which any state is Partial, what is."""
    out = []
    for bit in states.sub.bits:
        kinds = [
            VALUE * bool(s.partial & bit) + GRADIENT * bool(s.grad_partial & bit) for s in domain
        ]
        if any(kinds):
            out.append(Part(f"{title} partial on {states.sub.text(bit)}", kinds))
    return out
