"""How a rank gives up: it says what failed and which ranks are missing, and hangs up.

Aborting a group of gloo does nothing in torch, and its sockets live as long as anything refers to
the group. So the sockets that opened while a group was formed are noted here, and shut down when a
collective has failed: whoever waits for this rank fails at once. Channels of shared memory are told
the same. Other backends end by themselves.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from shardwright.errors import DistributedError
from shardwright.runtime.ranks import peers
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


_opened: dict[int, int] = {}
"""Inode -> file descriptor of sockets of process groups."""

_others: Any = weakref.WeakKeyDictionary()
"""What else ranks wait at -> what lets them wait no more."""


@contextmanager
def noting_sockets() -> Iterator[None]:
    """Note the sockets that are opened inside, where a process group is formed."""
    before = _sockets()
    try:
        yield
    finally:
        after = _sockets()
        _opened.update({inode: after[inode] for inode in after.keys() - before.keys()})


def on_hang_up(what: object, leave: Callable[[], None]) -> None:
    """Call `leave`, too, when this rank gives up, for as long as `what` is there."""
    _others[what] = leave


def hang_up() -> None:
    """Close what was noted to all other ranks; no collective works in this process afterwards."""
    for leave in list(_others.values()):
        leave()
    for inode, descriptor in _opened.items():
        with suppress(OSError):  # closed meanwhile
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # gloo aborts the process where its listening socket is shut down
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
    _opened.clear()


def _sockets() -> dict[int, int]:
    out: dict[int, int] = {}
    with suppress(OSError):  # a system that does not list them: then nobody hangs up early
        for name in os.listdir("/dev/fd"):  # noqa: PTH208 names are numbers
            with suppress(OSError):
                found = os.fstat(int(name))
                if stat.S_ISSOCK(found.st_mode):
                    out[found.st_ino] = int(name)
    return out
