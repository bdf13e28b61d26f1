"""Hanging up: what a rank that gives up does, so that no other waits for it until time is up.

Aborting a group of gloo does nothing in torch, and its sockets live as long as anything refers to
the group. So the sockets that opened while a group was formed are noted here, and shut down when a
collective has failed: whoever waits for this rank fails at once. Channels of shared memory are told
the same. Other backends end by themselves.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_opened: dict[int, int] = {}
"""Inode -> file descriptor of sockets of process groups."""

_others: Any = weakref.WeakKeyDictionary()
"""What else ranks wait at -> what lets them wait no more."""


@contextmanager
def noted() -> Iterator[None]:
    """Note the sockets that are opened inside, where a process group is formed."""
    before = _sockets()
    try:
        yield
    finally:
        after = _sockets()
        _opened.update({inode: after[inode] for inode in after.keys() - before.keys()})


def hangs_up(what: object, leave: Callable[[], None]) -> None:
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
