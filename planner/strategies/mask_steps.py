"""The steps of a redistribution between two states: transitions, sub-axes and their order.

The steps are those of `contract/redistribution_steps.py`, in masks of sub-axes instead of
placements. Sub-axes with the same change share one collective. Changes of Partial alone happen
while the tensor is sharded the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.planner.contract.transitions import TRANSITIONS, Kind, Transition
from shardwright.planner.strategies.state import Shards, State, kind_on


class MaskStep(NamedTuple):
    """A transition over some sub-axes, with the shards of the tensor before and after it."""

    mask: int
    transition: Transition
    before: Shards
    after: Shards


def steps(
    source: State, target: State, covered: tuple[int, int], bits: Iterable[int], cp: int = 0
) -> list[MaskStep] | None:
    """Return the steps from one state to the other, in order; None if no plan may do this.

    Args:
        source: The state before.
        target: The state after.
        covered: Masks of the sub-axes that shard every element of the tensor, before and after.
        bits: The masks of the single sub-axes.
        cp: The mask of cp, which is a mesh dim of its own; its steps come first. 0 without cp.
    """
    left, right = _by_mask(source.shards), _by_mask(target.shards)
    leaving, entering = sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())
    stays = left.keys() & right.keys()
    if (leaving and entering) or any(left[m] != right[m] for m in stays):
        return None
    most = source.shards | target.shards
    changes: dict[tuple[Kind, Kind, bool], int] = {}
    for bit in bits:
        change = kind_on(source, bit, covered[0]), kind_on(target, bit, covered[1]), bit == cp
        if change[0] != change[1]:
            changes[change] = changes.get(change, 0) | bit
    out: list[MaskStep] = []
    flags: list[MaskStep] = []
    for (before, after, _), mask in changes.items():
        found = TRANSITIONS.get((before, after))
        parts = [m for m in (*leaving, *entering) if m & mask]
        if found is None or not found.planned or any(m & ~mask for m in parts):
            return None
        if not parts:
            flags.append(MaskStep(mask, found, most, most))
        none: Shards = frozenset()
        out += [MaskStep(m, found, left.get(m, none), right.get(m, none)) for m in parts]
    out.sort(key=lambda step: (step.mask != cp, step.mask))
    now = source.shards
    for i, step in enumerate(out):
        after = now - step.before | step.after
        out[i] = step._replace(before=now, after=after)
        now = after
    flags.sort(key=lambda step: (step.mask != cp, step.mask))
    return [*out, *flags] if entering else [*flags, *out]


def without(shards: Shards, mask: int) -> Shards:
    """Return `shards` without those over the sub-axes of `mask`."""
    return frozenset(s for s in shards if not s[2] & mask)


def _by_mask(shards: Shards) -> dict[int, Shards]:
    return {m: frozenset(s for s in shards if s[2] == m) for m in {m for _, _, m in shards}}
