"""`State`: the sharded axes of a tensor, and the sub-axes over which it is Partial.

A state has the sharded axes, and the sub-axes over which the value or the gradient is Partial. On
each sub-axis a tensor is one `Kind` of `contract/transitions.py`. If only some parts of a
concatenation are sharded, the Partial gradient is that of the other parts.

The mesh dim may be a product of sub-axes (see `sub_axes.py`). Axes are then sharded over some
sub-axes, and values are Partial over some. A set of sub-axes is a mask; with one sub-axis, all
masks are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.planner.contract.transitions import GRAD_PARTIAL, Kind, kind_of

Shards = frozenset[tuple[int, int, int]]
"""(tensor dim, id of the atom, mask of sub-axes) of each sharded axis."""

Cut = frozenset[tuple[int, int]]
"""(id of the atom, mask of sub-axes) of each sharded axis of one dim."""


class State(NamedTuple):
    """Sharded axes of a tensor, and the sub-axes over which its value or gradient is Partial.

    With `shared`, a stored parameter is sharded over the copies of the model too.
    """

    shards: Shards = frozenset()
    partial: int = 0
    grad_partial: int = 0
    shared: bool = False

    @property
    def in_copy(self) -> State:
        """The state within one copy of the model, once its shards are gathered."""
        return self._replace(shared=False) if self.shared else self


REPLICATED = State()


def kind_on(state: State, bit: int, covered: int) -> Kind:
    """Return the kind of a tensor in `state` on one sub-axis, given its `States.covered`."""
    sharded = any(mask & bit for _, _, mask in state.shards)
    return kind_of(
        sharded, bool(covered & bit), bool(state.partial & bit), bool(state.grad_partial & bit)
    )


def cut_of(shards: Shards, dim: int) -> Cut:
    """Return the shards of dim `dim`."""
    return frozenset((a, m) for d, a, m in shards if d == dim)


def mask_at(cut: Cut, axis: int) -> int:
    """Return the mask of sub-axes that shard an axis in `cut`; 0 if it is unsharded."""
    return next((mask for at, mask in cut if at == axis), 0)


def made_partial(before: State, after: State) -> bool:
    """Whether `after` is `before` made Partial, which needs no communication."""
    return after.partial != 0 and after._replace(partial=0) == before


def looks_new(before: State, after: State) -> bool:
    """Whether a tensor shares its memory before and after, though autograd sees two tensors."""
    return before != after and before.shards == after.shards and not before.partial


def mask_of(shards: Shards) -> int:
    """Return the mask of the sub-axes that shard anything."""
    out = 0
    for _, _, mask in shards:
        out |= mask
    return out


def flags(kind: Kind, bit: int) -> tuple[int, int]:
    """Return (`bit` if the value is Partial, `bit` if the gradient is Partial), else 0 each."""
    return bit * (kind is Kind.PARTIAL), bit * (kind in GRAD_PARTIAL)


def flagged(shards: Shards, pending: Iterable[tuple[int, int]]) -> State:
    """Return the state with these shards and the `flags` of each sub-axis."""
    partial = grad_partial = 0
    for value, gradient in pending:
        partial |= value
        grad_partial |= gradient
    return State(shards, partial, grad_partial)
