"""What a tensor can be on a mesh dim: which axes are sharded, and over what it is Partial.

A state is a set of axes that are sharded, and the sub-axes over which the value or the gradient is
Partial; over each sub-axis that makes one `Kind` of `contract/transitions.py`. Where only some
parts of a concatenation are sharded, the Partial gradient is that of the others.

The mesh dim may be a product of sub-axes (see `sub_axes.py`). All of the above then holds for each
of them by itself: an axis is sharded over some, the value is Partial over some. A set of sub-axes
is a mask, and where there is one sub-axis all masks are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.planner.contract.transitions import GRAD_PARTIAL, Kind, kind_of

Shards = frozenset[tuple[int, int, int]]
"""(tensor dim, id of the atom, mask of the sub-axes that split it) of each split axis."""

Cut = frozenset[tuple[int, int]]
"""(id of the atom, mask) of each split axis of one dim."""


class State(NamedTuple):
    """Sharded axes of a tensor, and the sub-axes over which its value or gradient is Partial."""

    shards: Shards = frozenset()
    partial: int = 0
    grad_partial: int = 0


REPLICATED = State()


def kind_on(state: State, bit: int, covered: int) -> Kind:
    """What a tensor in `state` is on one sub-axis; `covered` is as `States.covered` says."""
    sharded = any(mask & bit for _, _, mask in state.shards)
    return kind_of(
        sharded, bool(covered & bit), bool(state.partial & bit), bool(state.grad_partial & bit)
    )


def cut_of(shards: Shards, dim: int) -> Cut:
    """What of `shards` splits dimension `dim`."""
    return frozenset((a, m) for d, a, m in shards if d == dim)


def made_partial(before: State, after: State) -> bool:
    """Whether `after` is `before` but for sums that became pending: no rank sent anything."""
    return after.partial != 0 and after._replace(partial=0) == before


def looks_new(before: State, after: State) -> bool:
    """Whether a tensor is the same memory behind a change, though autograd sees another one."""
    return before != after and before.shards == after.shards and not before.partial


def mask_of(shards: Shards) -> int:
    """The sub-axes that split anything."""
    out = 0
    for _, _, mask in shards:
        out |= mask
    return out


def flags(kind: Kind, bit: int) -> tuple[int, int]:
    """The sub-axis as a mask if it is one that the value is Partial over, and the gradient."""
    return bit * (kind is Kind.PARTIAL), bit * (kind in GRAD_PARTIAL)


def flagged(shards: Shards, pending: Iterable[tuple[int, int]]) -> State:
    """The state with these shards, and with the `flags` of each sub-axis."""
    partial = grad_partial = 0
    for value, gradient in pending:
        partial |= value
        grad_partial |= gradient
    return State(shards, partial, grad_partial)
