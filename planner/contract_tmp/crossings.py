"""What it takes to bring a tensor from one state to another: collectives, forward and backward.

Each set of sub-axes is in one of six kinds on either side: whole, partial or copied where nothing
is split over it, shard where all is, parts or stored parts where some of a concatenation is. The
table has what the runtime does for a pair of kinds: a collective, or one of three copies that no
other rank knows of. Sub-axes that make the same change make it together, in one collective; what
changes in pending sums happens while the tensor is split the most.

take        this rank's part of a whole tensor
pad         a whole tensor with this rank's part, else zeros
keep_first  a term of a sum: the tensor on the first rank, zeros on the others
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.planner.strategies.states import Shards, State, mask_of

SHARED = "all_reduce of what is shared"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", SHARED)

CROSSINGS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("whole", "copied"): ((), ("all_reduce",)),
    ("whole", "partial"): (("keep_first",), ()),
    ("whole", "shard"): (("take",), ("all_gather",)),
    ("whole", "stored parts"): (("take",), ()),
    ("copied", "whole"): ((), ("keep_first",)),
    ("copied", "partial"): (("keep_first",), ("keep_first",)),
    ("copied", "shard"): (("take",), ("pad",)),
    ("copied", "parts"): (("take",), ("pad",)),
    ("partial", "whole"): (("all_reduce",), ()),
    ("partial", "copied"): (("all_reduce",), ("all_reduce",)),
    ("partial", "shard"): (("reduce_scatter",), ("all_gather",)),
    ("shard", "whole"): (("all_gather",), ("take",)),
    ("shard", "copied"): (("all_gather",), ("reduce_scatter",)),
    ("stored parts", "parts"): ((), (SHARED,)),
}
"""(source, target) -> what is done forward and backward; what is missing no boundary can do."""


class Step(NamedTuple):
    """What is done over some sub-axes, and how the tensor is split before and after that."""

    mask: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    before: Shards
    after: Shards


def steps(
    source: State, target: State, covered: tuple[int, int], bits: Iterable[int]
) -> list[Step] | None:
    """The steps from one state to the other, in order; None if there is no way.

    Args:
        source: The state before.
        target: The state after.
        covered: Masks of the sub-axes over which all of the tensor is split, before and after.
        bits: The masks of the single sub-axes.
    """
    left, right = _by_mask(source.shards), _by_mask(target.shards)
    leaving, entering = sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())
    stays = left.keys() & right.keys()
    if (leaving and entering) or any(left[m] != right[m] for m in stays):
        return None
    most = source.shards | target.shards
    changes: dict[tuple[str, str], int] = {}
    for bit in bits:
        kinds = _kind(source, covered[0], bit), _kind(target, covered[1], bit)
        if kinds[0] != kinds[1]:
            changes[kinds] = changes.get(kinds, 0) | bit
    out: list[Step] = []
    flags: list[Step] = []
    for kinds, mask in changes.items():
        entry = CROSSINGS.get(kinds)
        parts = [m for m in (*leaving, *entering) if m & mask]
        if entry is None or any(m & ~mask for m in parts):
            return None
        if not parts:
            flags.append(Step(mask, *entry, most, most))
        out += [Step(m, *entry, left.get(m, frozenset()), right.get(m, frozenset())) for m in parts]
    out.sort(key=lambda step: step.mask)
    now = source.shards
    for i, step in enumerate(out):
        after = now - step.before | step.after
        out[i] = step._replace(before=now, after=after)
        now = after
    flags.sort(key=lambda step: step.mask)
    return [*out, *flags] if entering else [*flags, *out]


def without(shards: Shards, mask: int) -> Shards:
    """`shards` but for what is split over the sub-axes of `mask`."""
    return frozenset(s for s in shards if not s[2] & mask)


def _by_mask(shards: Shards) -> dict[int, Shards]:
    return {m: frozenset(s for s in shards if s[2] == m) for m in {m for _, _, m in shards}}


def _kind(state: State, covered: int, bit: int) -> str:
    if not mask_of(state.shards) & bit:
        return "partial" if state.partial & bit else "copied" if state.copied & bit else "whole"
    if covered & bit:
        return "shard"
    return "parts" if state.copied & bit else "stored parts"
