"""Kinds of placement on one mesh axis, and the table of transitions between them.

A transition is a pair of actions: one on the value in the forward pass, one on its gradient in the
backward pass. The gradient of a Partial value is replicated, and that of a grad-Partial value is
Partial, so the backward pass is the table read in reverse. The planner prices transitions by this
table, the checker verifies by it, the runtime carries them out, and reports name them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What the ranks of one mesh dim or sub-axis hold of a tensor."""

    REPLICATE = "replicate"
    """The same value on each rank, and the same gradient."""
    PARTIAL = "partial"
    """One term of a sum on each rank."""
    GRAD_PARTIAL = "grad-partial"
    """The same value on each rank, one term of its gradient."""
    SHARD = "shard"
    """A part on each rank, each element on one rank."""
    SEGMENTS = "segments"
    """Some segments of a concatenation sharded, the rest replicated: as parameters are stored."""
    SEGMENTS_GRAD_PARTIAL = "segments, grad-partial"
    """Like SEGMENTS, with one term of the gradient of the replicated rest: as ops use it."""


GRAD_PARTIAL = frozenset({Kind.GRAD_PARTIAL, Kind.SEGMENTS_GRAD_PARTIAL})
"""The kinds with a Partial gradient."""


def kind_of(sharded: bool, covered: bool, partial: bool, grad_partial: bool) -> Kind:
    """Return the kind of a tensor on a mesh axis.

    Args:
        sharded: Whether the axis shards any part of the tensor.
        covered: Whether it shards every element; only the gradient of other elements can be
            Partial.
        partial: Whether the value is Partial over the axis.
        grad_partial: Whether the gradient of the unsharded elements is Partial over the axis.
    """
    if sharded:
        if covered:
            return Kind.SHARD
        return Kind.SEGMENTS_GRAD_PARTIAL if grad_partial else Kind.SEGMENTS
    if partial:
        return Kind.PARTIAL
    return Kind.GRAD_PARTIAL if grad_partial else Kind.REPLICATE


class Order(NamedTuple):
    """How the ranks' shards make up the unsharded tensor.

    `pieces`: a shard is several pieces of the dim. `in_turn`: in memory, the unsharded tensor is
    equal shards one after the other, so that gathering and scattering need no copy.
    """

    pieces: bool
    in_turn: bool


APART = Order(pieces=False, in_turn=False)


class Work(NamedTuple):
    """What an action applies to: bytes of the largest shard, of the unsharded tensor, and ranks.

    `hosts` is how many hosts the ranks are on.
    """

    part: int
    whole: int
    ranks: int
    order: Order = APART
    hosts: int = 1

    @property
    def shared(self) -> int:
        """Return the bytes of the segments that all ranks hold."""
        if self.ranks < 2:
            return self.whole
        return max((self.part * self.ranks - self.whole) // (self.ranks - 1), 0)


class Collective(NamedTuple):
    """A collective: its kind, its input bytes on a rank, its ranks, and the hosts they are on."""

    kind: str
    bytes: int
    ranks: int
    hosts: int = 1


def _none(_: Work) -> int:
    return 0


@dataclass(frozen=True, eq=False)
class Action:
    """An operation on a value or a gradient over one mesh axis.

    Attributes:
        name: The runtime's name for it.
        kind: Its collective, if it has one.
        enters: Input bytes of the collective on one rank. With uneven parts, a reduce-scatter moves
            the largest part once for each rank.
        copies: Bytes that the rank's extra copies read and write: an all-reduce works on a copy,
            gathered shards are concatenated, and a shard that is taken is new memory.
    """

    name: str
    kind: str = ""
    enters: Callable[[Work], int] = _none
    copies: Callable[[Work], int] = _none

    def collective(self, work: Work) -> Collective | None:
        """Return the action's collective; None if ranks send nothing."""
        if not self.kind:
            return None
        return Collective(self.kind, self.enters(work), work.ranks, work.hosts)

    def __repr__(self) -> str:
        return self.name


IDENTITY = Action("identity")
ALL_REDUCE = Action("all_reduce", "all_reduce", lambda w: w.whole, lambda w: 2 * w.whole)
ALL_GATHER = Action(
    "all_gather", "all_gather", lambda w: w.part, lambda w: 0 if w.order.in_turn else 2 * w.whole
)
REDUCE_SCATTER = Action(
    "reduce_scatter",
    "reduce_scatter",
    lambda w: w.part * w.ranks,
    lambda w: 0 if w.order.in_turn else (4 if w.order.pieces else 2) * w.whole,
)
REDUCE_SHARED = Action(
    "reduce_shared", "all_reduce", lambda w: w.shared, lambda w: 2 * w.shared + 2 * w.part
)
"""An all-reduce of the segments that all ranks hold, not of the sharded ones."""
TAKE = Action("take", copies=lambda w: 2 * w.part)
"""This rank's shard of a replicated tensor."""
PAD = Action("pad", copies=lambda w: 3 * w.whole - w.part)
"""A full tensor with this rank's shard, and zeros elsewhere."""
KEEP_FIRST = Action("keep_first", copies=lambda w: w.whole)
"""A term of a sum: the tensor on the first rank, zeros on the others."""

KEEP_FIRST_SHARED = Action("keep_first_shared", copies=lambda w: 2 * w.part)
"""Like KEEP_FIRST, but only for the segments that all ranks hold."""


class Transition(NamedTuple):
    """The actions of the forward and backward pass from one kind to another.

    `planned`: whether plans may contain it. The others would give up sharded work, or are for
    tensors outside of a forward pass (a checkpoint).
    """

    forward: Action
    backward: Action
    planned: bool = True


_R, _P, _G, _S, _M, _MG = Kind

TRANSITIONS: dict[tuple[Kind, Kind], Transition] = {
    (_R, _P): Transition(KEEP_FIRST, IDENTITY),
    (_R, _G): Transition(IDENTITY, ALL_REDUCE),
    (_R, _S): Transition(TAKE, ALL_GATHER),
    (_R, _M): Transition(TAKE, ALL_GATHER),
    (_P, _R): Transition(ALL_REDUCE, IDENTITY),
    (_P, _G): Transition(ALL_REDUCE, ALL_REDUCE),
    (_P, _S): Transition(REDUCE_SCATTER, ALL_GATHER),
    (_G, _R): Transition(IDENTITY, KEEP_FIRST),
    (_G, _P): Transition(KEEP_FIRST, KEEP_FIRST),
    (_G, _S): Transition(TAKE, PAD),
    (_G, _MG): Transition(TAKE, PAD),
    (_S, _R): Transition(ALL_GATHER, TAKE),
    (_S, _P): Transition(PAD, TAKE, planned=False),
    (_S, _G): Transition(ALL_GATHER, REDUCE_SCATTER),
    (_M, _R): Transition(ALL_GATHER, TAKE, planned=False),
    (_M, _MG): Transition(IDENTITY, REDUCE_SHARED),
    (_MG, _M): Transition(IDENTITY, KEEP_FIRST_SHARED, planned=False),
}
"""(before, after) -> the transition. Other pairs take two transitions, or are impossible."""


def route(before: Kind, after: Kind) -> tuple[Transition, ...] | None:
    """Return the transitions from one kind to another: none, one, or two via a third kind.

    Returns None if the change is not possible.
    """
    if before == after:
        return ()
    if (before, after) in TRANSITIONS:
        return (TRANSITIONS[before, after],)
    for between in (_G, _R, _M):
        if (before, between) in TRANSITIONS and (between, after) in TRANSITIONS:
            return TRANSITIONS[before, between], TRANSITIONS[between, after]
    return None


BUCKET = 25 << 20
"""Most bytes of gradients that copies of the model average together, as in DDP."""


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Return which gradients copies of the model average in one all-reduce, by their positions.

    The smallest come first, so that how many there are does not depend on the order of `sizes`,
    the bytes of gradients of one kind. One that is larger than a bucket is alone.
    """
    out: list[list[int]] = []
    room = -1
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if sizes[i] > room:
            out.append([])
            room = BUCKET
        out[-1].append(i)
        room -= sizes[i]
    return out
