"""A channel: memory shared by the ranks of a group, and collectives through it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.shared_memory.compiled import CHECK, library

ROOM = 4 << 20
"""Bytes of each of a rank's two buffers, which take memory only where used. Longer messages are
sent in pieces, and the ranks wait for each other at each piece."""

SPINS = 2000
"""How often a rank polls before it yields the processor, if each rank has a processor."""

MAX_RANKS = 1024
"""Most ranks that can share one memory; the same as in `collectives.cpp`."""

DTYPES = {
    # dtypes of sums, and their numbers in `collectives.cpp`
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
    """Return the bytes of the memory that `ranks` ranks share."""
    return library().shardwright_bytes(ranks, room)


class Channel:
    """Collectives of a group. All ranks must call the same ones in the same order.

    Results are new tensors. A sum that every rank gets in full has the same bits on all ranks.

    Args:
        file: Descriptor of a file of `size(ranks, room)` bytes, zeros at first, the same on all
            ranks. It may be closed afterwards.
        rank: This rank in the group.
        ranks: The number of ranks.
        look: Called now and then while this rank waits, with the seconds waited so far; it raises
            to end the wait.
        room: Bytes of a buffer, the same on all ranks: a multiple of 8, and at least 16 for each.
    """

    def __init__(
        self, file: int, rank: int, ranks: int, look: Callable[[float], object], room: int = ROOM
    ) -> None:
        lib = library()
        self.ranks = ranks
        self._look, self._begun = look, 0.0
        self._error: BaseException | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._check = CHECK(self._asked)  # kept alive as long as the library may call it
        memory = mmap.mmap(file, size(ranks, room))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        spins = SPINS if len(os.sched_getaffinity(0)) >= ranks else 0
        state = ctypes.create_string_buffer(lib.shardwright_state())
        lib.shardwright_open(state, start, rank, ranks, room, spins, self._check)
        self._state = state
        self._functions = {
            kind: getattr(lib, f"shardwright_{kind}")
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        }
        self.leave = partial(_leave, state, memory, self._pid)
        """Make all calls fail from now on, on all ranks, including those that wait for this one."""
        weakref.finalize(self, self.leave)

    def run(
        self,
        kind: str,
        x: Tensor,
        op: str = "sum",
        spent: bool = False,
        rows: int = 1,
        sizes: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Tensor:
        """Run a collective on a contiguous `x`, in a single call: it runs for each decoded token.

        Args:
            kind: "all_reduce" returns the sum over the ranks. "all_gather" combines the [rows, n]
                of each rank to [rows, ranks, n]. "reduce_scatter" sums [ranks, n] and returns this
                rank's [n]. "all_to_all" sends rows to each rank. The results of the last three are
                flat.
            x: A tensor of the same size and dtype on all ranks, except for an all-to-all.
            op: "sum", or "max" or "min" for an all-reduce.
            spent: Whether an all-reduce may overwrite `x` with its result.
            rows: Number of rows for an all-gather.
            sizes: How many elements each rank gets from this one in an all-to-all, and how many
                come from each.

        Raises:
            RuntimeError: another rank failed or called something else, or this process is a fork
                of a rank.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this process is a fork of a rank, which has no part in collectives")
        call = self._functions[kind]
        if kind == "all_reduce":
            out = x if spent else torch.empty_like(x)
            given: tuple[Any, ...] = x.numel(), DTYPES[x.dtype], REDUCTIONS[op]
        elif kind == "all_gather":
            out = x.new_empty(self.ranks * x.numel())
            given = x.nbytes, rows
        elif kind == "all_to_all":
            out = x.new_empty(sum(sizes[1]))
            array = ctypes.c_uint64 * self.ranks
            given = tuple(array(*(n * x.itemsize for n in each)) for each in sizes)
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
        """Tell the library, which calls this while it waits, whether to stop; keep the error."""
        try:
            now = time.monotonic()
            self._begun = self._begun or now
            self._look(now - self._begun)
        except BaseException as error:  # including exceptions that signal handlers raise
            self._error = error
            return 1
        return 0


def _leave(state: Any, memory: mmap.mmap, pid: int) -> None:
    """Mark this rank as gone. Holds `memory`, which must exist as long as a rank may leave."""
    if os.getpid() == pid:  # a fork has the memory, but is not a rank
        library().shardwright_leave(state)
