"""A channel: the memory that the ranks of a group share, and the collectives that go through it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.shared_memory.compiled import CHECK, library

ROOM = 4 << 20
"""Bytes of a rank's buffer, of which it has two, in memory as far as it is used: longer messages go
in pieces, and for each of these the ranks wait for each other."""

SPINS = 2000
"""How often a rank looks before it yields the processor, where each rank has one."""

MOST_RANKS = 1024
"""That share one memory; as in `collectives.cpp`."""

DTYPES = {
    # those of sums, and their numbers in `collectives.cpp`
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
REDUCTIONS = {"sum": 0, "max": 1, "min": 2}

OUTCOMES = {
    1: "another rank has given up",
    3: "another rank called another collective, or on a tensor of another size or dtype",
}


def size(ranks: int, room: int = ROOM) -> int:
    """Bytes of the memory that so many ranks share."""
    return library().shardwright_bytes(ranks, room)


class Channel:
    """Collectives of a group; all ranks call the same ones in the same order.

    Their results are new tensors, with the same bits on all ranks where a sum is whole on each.

    Args:
        file: Of `size(ranks, room)` bytes, zeros at first, the same on all ranks; may be closed.
        rank: This one, in the group.
        ranks: How many there are.
        look: Called from time to time while others are waited for, with the seconds that it has
            taken; raises if it should be waited no more.
        room: Bytes of a buffer, the same on all ranks; at least 8 for each of them.
    """

    def __init__(
        self,
        file: int,
        rank: int,
        ranks: int,
        look: Callable[[float], object],
        room: int = ROOM,
    ) -> None:
        lib = library()
        self.ranks = ranks
        self._look, self._begun = look, 0.0
        self._error: BaseException | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._check = CHECK(self._asked)  # lives as long as the library may call it
        memory = mmap.mmap(file, size(ranks, room))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        spins = SPINS if len(os.sched_getaffinity(0)) >= ranks else 0
        state = ctypes.create_string_buffer(lib.shardwright_state())
        lib.shardwright_open(state, start, rank, ranks, room, spins, self._check)
        self._state = state
        self._functions = {
            kind: getattr(lib, f"shardwright_{kind}")
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
        }
        self.leave = partial(_leave, state, memory, self._pid)
        """Let all calls fail from now on, on all ranks, also those that wait for this one."""
        weakref.finalize(self, self.leave)

    def run(
        self, kind: str, x: Tensor, op: str = "sum", spent: bool = False, rows: int = 1
    ) -> Tensor:
        """A collective of a contiguous `x`, in one call: it is made for each token that is decoded.

        Args:
            kind: "all_reduce" gives the sum over the ranks; "all_gather" makes of the [rows, n] of
                each rank [rows, ranks, n]; "reduce_scatter" of [ranks, n] the [n] of the sum that
                are this rank's. But for the first, results are flat.
            x: Of the same size and dtype on all ranks.
            op: "sum"; of an all-reduce "max" or "min", too.
            spent: Whether an all-reduce may leave its result in `x`.
            rows: Of an all-gather.

        Raises:
            RuntimeError: another rank has failed or called something else, or this is no rank.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this process is a fork of a rank, which has no part in collectives")
        call = self._functions[kind]
        if kind == "all_reduce":
            out = x if spent else torch.empty_like(x)
            given: tuple[int, ...] = x.numel(), DTYPES[x.dtype], REDUCTIONS[op]
        elif kind == "all_gather":
            out = x.new_empty(self.ranks * x.numel())
            given = x.nbytes, rows
        else:
            out = x.new_empty(x.numel() // self.ranks)
            given = out.numel(), DTYPES[x.dtype]
        with self._lock:  # one thread at a time
            self._begun = 0.0
            outcome = call(self._state, x.data_ptr(), out.data_ptr(), *given)
            if outcome:
                self.leave()
                error, self._error = self._error, None
                raise error or RuntimeError(OUTCOMES[outcome])
        return out

    def _asked(self) -> int:
        """Called by the library while it waits: whether to stop, and keep in mind why."""
        try:
            now = time.monotonic()
            self._begun = self._begun or now
            self._look(now - self._begun)
        except BaseException as error:  # also a signal's
            self._error = error
            return 1
        return 0


def _leave(state: Any, memory: mmap.mmap, pid: int) -> None:
    """Holds the memory, too: it is there for as long as a rank may say that it has left."""
    if os.getpid() == pid:  # a fork has the memory, and is no rank
        library().shardwright_leave(state)
