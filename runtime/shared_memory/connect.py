"""Decides which groups get a channel: gloo groups on one host whose ranks can map one memory.

The memory has no name in any file system. The first rank creates it and the others open it through
the first rank's process, so nothing is left behind however the ranks end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.runtime.ranks import peers
from shardwright.runtime.ranks.agreement import first_reason, gather
from shardwright.runtime.ranks.failure import named, on_hang_up
from shardwright.runtime.ranks.peers import Peer
from shardwright.runtime.shared_memory.channel import MAX_RANKS, Channel, size
from shardwright.runtime.shared_memory.compiled import UnavailableError, library, version

LOG = logging.getLogger("shardwright")

NAME = "shardwright"
"""What the system calls the memory, in addition to its number."""

_known: Any = WeakIdKeyDictionary()
"""Process group -> its channel, or None."""


class _Offer(NamedTuple):
    """What a rank tells the others: why it cannot share, or where it runs and its memory."""

    why_not: str | None
    host: str
    version: str
    pid: int
    memory: int | None
    """A file descriptor of that process."""


def channel_of(group: dist.ProcessGroup) -> Channel | None:
    """Return a group's channel, if it has one. Its ranks must make the first call together.

    Raises:
        DistributedError: a rank died before all had the channel.
    """
    if group not in _known:
        _known[group] = _connected(group) if _is_gloo(group) else None
    return _known[group]


def _is_gloo(group: dist.ProcessGroup) -> bool:
    if not dist.is_gloo_available():
        return False
    try:
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    except RuntimeError:  # the group has no CPU backend
        return False


def _connected(group: dist.ProcessGroup) -> Channel | None:
    ranks, channel, file = dist.get_process_group_ranks(group), None, None
    try:
        why_not = _why_not(len(ranks))
        if why_not is None and group.rank() == 0:
            try:
                file = os.memfd_create(NAME)
                os.ftruncate(file, size(len(ranks)))
            except OSError as error:  # as `ulimit -f` makes it
                why_not = f"they get no memory to share: {error}"
        mine = _Offer(why_not, Peer.this(len(ranks)).host, version(), os.getpid(), file)
        offers = gather("sharing memory", mine, group, _Offer)
        failure = _refusal(offers)
        if failure is None:
            try:
                channel = _opened(offers[0], group, ranks)
            except OSError as error:
                failure = str(error)
            failure = first_reason("sharing memory", failure, group)
    finally:
        if file is not None:
            os.close(file)
    if failure is None:
        LOG.info("%s share memory", named(ranks))
        return channel
    LOG.info("%s talk over gloo: %s", named(ranks), failure)
    return None


def _why_not(ranks: int) -> str | None:
    if ranks > MAX_RANKS:
        return f"they are more than {MAX_RANKS}"
    if os.environ.get("SHARDWRIGHT_SHARED_MEMORY", "1") in ("", "0"):
        return "SHARDWRIGHT_SHARED_MEMORY=0"
    if not hasattr(os, "memfd_create"):
        return "this system has no memory without a name"
    try:
        library()
    except UnavailableError as error:
        return str(error)
    return None


def _refusal(offers: Sequence[_Offer]) -> str | None:
    for offer in offers:
        if offer.why_not is not None:
            return offer.why_not
    if len({offer.host for offer in offers}) > 1:
        return "they are not on one host"
    return None if len({offer.version for offer in offers}) == 1 else "their versions differ"


def _opened(offer: _Offer, group: dist.ProcessGroup, ranks: Sequence[int]) -> Channel:
    """Open the channel in the memory that the first rank offers.

    Raises:
        OSError: it cannot be opened, or is not such memory.
    """
    path = f"/proc/{offer.pid}/fd/{offer.memory}"
    if not str(Path(path).readlink()).startswith(f"/memfd:{NAME} "):
        raise OSError("the first rank offers something that is not its memory")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != size(len(ranks)):
            raise OSError("the first rank offers memory of another size")
        others = set(ranks) - {dist.get_rank()}
        options = group._get_backend(torch.device("cpu")).options  # keeps no reference to the group
        channel = Channel(file, group.rank(), len(ranks), _looking(others, options))
    finally:
        os.close(file)
    on_hang_up(channel, channel.leave)
    return channel


def _looking(others: Collection[int], options: Any) -> Callable[[float], None]:
    """Return what a waiting rank does now and then: it checks the other ranks and the timeout."""
    roll = peers.roll()

    def look(seconds: float) -> None:
        if gone := sorted(set(roll.gone()).intersection(others)):
            raise RuntimeError(f"{named(gone)} ended")
        limit = options._timeout.total_seconds()
        if seconds > limit:
            raise RuntimeError(f"Timed out after {limit:g} s")

    return look
