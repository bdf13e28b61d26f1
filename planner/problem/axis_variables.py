"""The state of a tensor as integers: one for each of its axes, one for each sub-axis.

The integer of an axis is the set of sub-axes that split it, as a mask: 0 where it is whole, and of
two sets of which one holds the other the larger is the larger number. The integer of a sub-axis
says what is Partial over it. A state and its integers say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.planner.graph.axes import Dim
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.names import places, tensor_names
from shardwright.planner.solvers.problem import Part
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States

VALUE, GRADIENT = 1, 2
"""What is Partial over a sub-axis; 0 where nothing is. Both would be their sum: no state is so."""


def axis_variables(graph: Graph, states: States) -> dict[str, tuple[Part, ...]]:
    """Tensor that has a variable -> the parts of its states, of those that differ between states.

    `mlp.up_proj.weight[0]` is the axis at dim 0 of that parameter, `mlp.down_proj.weight[1:
    mlp.up_proj.weight[0]]` the same axis at dim 1 of another one, `mlp out 0 partial on tp` what
    the output of a module is over that mesh dim.
    """
    first: dict[int, str] = {}
    out = {}
    for name, title in tensor_names(graph).items():
        domain = states.domain(name)
        split = _split(title, states.axes.dims[name], domain, first)
        out[name] = (*split, *_partial(title, domain, states))
    return out


def _split(
    title: str, dims: Sequence[Dim], domain: Sequence[State], first: dict[int, str]
) -> Iterator[Part]:
    """For each axis of a tensor that any state splits, over which sub-axes.

    `first` is the name of each axis in the first tensor that has it.
    """
    found = {(d, a) for state in domain for d, a, _ in state.shards}
    for d, axis, place in places(dims) if found else ():
        if (d, axis) in found:
            found.remove((d, axis))  # several parts of a dim may be one axis
            label = f"{title}[{place}]"
            known = first.setdefault(axis, label)
            if known != label:
                label = f"{title}[{place}: {known}]"
            masks = [sum(m for e, a, m in s.shards if (e, a) == (d, axis)) for s in domain]
            yield Part(label, masks)


def _partial(title: str, domain: Sequence[State], states: States) -> Iterator[Part]:
    """For each sub-axis over which any state is Partial, what is."""
    for bit in states.sub.bits:
        kinds = [
            VALUE * bool(s.partial & bit) + GRADIENT * bool(s.grad_partial & bit) for s in domain
        ]
        if any(kinds):
            yield Part(f"{title} partial on {states.sub.text(bit)}", kinds)
