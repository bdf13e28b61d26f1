"""Errors of what ranks do together: what was done, on which rank, and which is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

from shardwright.errors import DistributedError
from shardwright.runtime.ranks import peers
from shardwright.runtime.ranks.connections import hang_up
from shardwright.runtime.ranks.peers import Roll


def failed(what: str, error: RuntimeError, pg: dist.ProcessGroup | None) -> DistributedError:
    """An error for a collective of `pg` that failed, naming the ranks that left first."""
    ranks = dist.get_process_group_ranks(pg)  # pyright: ignore[reportArgumentType] None is the world
    return lost(what, error, peers.roll(), ranks)


def lost(what: str, error: RuntimeError, roll: Roll, among: Sequence[int]) -> DistributedError:
    """An error for what the ranks `among` did together and what failed."""
    hang_up()  # first, so that those who wait for this rank answer, too
    missing, text = roll.missing(among), short(error)
    if roll.rank in missing:
        return DistributedError(
            f"{what} failed on rank {roll.rank}: the other ranks waited for it in vain, and have "
            f"given up ({text}): look at what it did meanwhile, or give a longer `timeout`"
        )
    if missing:
        return DistributedError(
            f"{what} failed on rank {roll.rank}: no answer from {named(missing)}, which died or "
            f"hangs ({text}): look at the output of {named(missing)}"
        )
    return DistributedError(
        f"{what} failed on rank {roll.rank}: {text}: if the ranks were not given the same, "
        "SHARDWRIGHT_DEBUG=1 tells where they differ"
    )


def short(error: BaseException) -> str:
    """The first sentence of an error of torch's."""
    text = (str(error).strip() or "no message").splitlines()[0]
    # gloo begins with its source line and ends with good wishes
    return re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0]


def named(ranks: Sequence[int]) -> str:
    """In words: one is "rank 1", two are "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
