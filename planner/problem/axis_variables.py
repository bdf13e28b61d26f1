"""Encodes the state of a tensor as integers: one for each of its axes, one for each sub-axis.

The integer of an axis is the set of sub-axes that shard it, as a mask; 0 if the axis is unsharded.
A superset has a larger number. The integer of a sub-axis says what is Partial over it. A last one
says of a parameter whether copies of the model share it out. A state determines its integers, and
the integers determine the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.planner.graph.axes import Dim
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.readable_names import places, tensor_names
from shardwright.planner.solvers.problem import Part
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States

VALUE, GRADIENT = 1, 2
"""What is Partial over a sub-axis; 0 for nothing. No state has both."""

AxisMasks = dict[tuple[int, int], list[int]]
"""(dim, axis) -> the mask of the sub-axes that shard it, in each state of a domain."""


def axis_variables(graph: Graph, states: States) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each tensor that has a variable, as far as they differ between states.

    `mlp.up_proj.weight[0]` is the axis at dim 0 of that parameter, `mlp.down_proj.weight[1:
    mlp.up_proj.weight[0]]` the same axis at dim 1 of another parameter, `mlp out 0 partial on tp`
    says what of a module's output is Partial over that mesh dim, and `mlp.up_proj.weight shared
    out` whether copies of the model share that parameter out.
    """
    first: dict[int, str] = {}
    known: dict[int, tuple[AxisMasks, dict[str, list[int]]]] = {}
    out = {}
    for name, title in tensor_names(graph).items():
        domain = states.domain(name)
        if id(domain) not in known:  # many tensors share a domain
            known[id(domain)] = _masks(domain), _kinds(domain, states)
        masks, kinds = known[id(domain)]
        split = _split(title, states.axes.dims[name], masks, first)
        out[name] = (*split, *(Part(f"{title} {what}", of) for what, of in kinds.items()))
    return out


def _split(
    title: str, dims: Sequence[Dim], masks: AxisMasks, first: dict[int, str]
) -> Iterator[Part]:
    """Yield a part for each axis of a tensor that any state shards: the sub-axes.

    `first` has the name of each axis in the first tensor with that axis.
    """
    left = {*masks}
    for d, axis, place in places(dims, {d for d, _ in left}):
        if (d, axis) in left:
            left.remove((d, axis))  # several parts of a dim may be one axis
            label = f"{title}[{place}]"
            known = first.setdefault(axis, label)
            if known != label:
                label = f"{title}[{place}: {known}]"
            yield Part(label, masks[d, axis])


def _masks(domain: Sequence[State]) -> AxisMasks:
    """Return for each (dim, axis) that any state shards the mask of sub-axes in each state."""
    out: AxisMasks = {}
    for i, state in enumerate(domain):
        for d, axis, mask in state.shards:
            out.setdefault((d, axis), [0] * len(domain))[i] += mask
    return out


def _kinds(domain: Sequence[State], states: States) -> dict[str, list[int]]:
    """Return what else states differ in, with an integer for each state.

    It is what is Partial, for each sub-axis over which any state is, and whether it is shared out.
    """
    shared = [int(s.shared) for s in domain]
    out = {"shared out": shared} if any(shared) else {}
    for bit in states.sub.bits:
        kinds = [
            VALUE * bool(s.partial & bit) + GRADIENT * bool(s.grad_partial & bit) for s in domain
        ]
        if any(kinds):
            out[f"partial on {states.sub.text(bit)}"] = kinds
    return out
