"""How a rank gives up after a failure: it names the missing ranks and closes its connections.

Aborting a gloo group does nothing in torch, and its sockets stay open as long as anything refers to
the group. This module therefore notes the sockets that are opened while a group is formed, and
shuts them down when a collective has failed, so that ranks waiting for this one fail at once.
Shared-memory channels are told as well. Other backends end by themselves.
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

from shardwright.errors import DistributedError, first_line
from shardwright.runtime.ranks import peers
from shardwright.runtime.ranks.peers import Roll


def failed(what: str, error: RuntimeError, pg: dist.ProcessGroup | None) -> DistributedError:
    """Return the error for a failed collective of `pg`, naming the ranks that left first."""
    ranks = dist.get_process_group_ranks(pg)  # pyright: ignore[reportArgumentType] None is the world
    return lost(what, error, peers.roll(), ranks)


def lost(what: str, error: Exception, roll: Roll, among: Sequence[int]) -> DistributedError:
    """Hang up, and return the error for a failed step of the ranks `among`."""
    hang_up()  # first, so that the ranks that wait for this one answer too
    missing, text = roll.missing(among), short(error)
    if roll.rank in missing:
        return DistributedError(
            f"{what} failed on rank {roll.rank}: this rank was late, and the other ranks timed out "
            f"waiting for it ({text}): find out what kept it, or give a longer `timeout`"
        )
    if missing:
        return DistributedError(
            f"{what} failed on rank {roll.rank}: no answer from {named(missing)}, which died or "
            f"hangs ({text}): look at the output of {named(missing)}"
        )
    return DistributedError(
        f"{what} failed on rank {roll.rank}: {text}: if ranks may have got different inputs, "
        "run with SHARDWRIGHT_DEBUG=1 to see where they differ"
    )


def short(error: BaseException) -> str:
    """Return the first sentence of a torch error."""
    # gloo's messages begin with a source location and end with advice
    return re.sub(r"^\[[^\]]*\]\s*", "", first_line(error)).split(". ")[0]


def named(ranks: Sequence[int]) -> str:
    """Return "rank 1" for one rank, "ranks 1, 2" for several."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_opened: dict[int, int] = {}
"""Inode -> file descriptor of the sockets of process groups."""

_others: Any = weakref.WeakKeyDictionary()
"""Other things that ranks wait on -> a function that ends the wait."""


@contextmanager
def noting_sockets() -> Iterator[None]:
    """Note the sockets opened inside, for code that forms a process group."""
    before = _sockets()
    try:
        yield
    finally:
        after = _sockets()
        _opened.update({inode: after[inode] for inode in after.keys() - before.keys()})


def on_hang_up(what: object, leave: Callable[[], None]) -> None:
    """Call `leave` when this rank gives up, as long as `what` is alive."""
    _others[what] = leave


def hang_up() -> None:
    """Close all noted connections. No collective works in this process afterwards."""
    for leave in list(_others.values()):
        leave()
    for inode, descriptor in _opened.items():
        with suppress(OSError):  # closed meanwhile
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # gloo aborts the process if its listening socket is shut down
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
    _opened.clear()


def _sockets() -> dict[int, int]:
    out: dict[int, int] = {}
    with suppress(OSError):  # without /dev/fd no socket is noted, and nobody hangs up early
        for name in os.listdir("/dev/fd"):  # noqa: PTH208 names are numbers
            with suppress(OSError):
                found = os.fstat(int(name))
                if stat.S_ISSOCK(found.st_mode):
                    out[found.st_ino] = int(name)
    return out
