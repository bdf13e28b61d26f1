"""All-reduces of GPU ranks that read each other's memory, through torch's symmetric memory.

The messages of a token are short: starting a collective takes longer than moving their bytes. A
kernel that reads all other ranks' memory at once ("one shot") starts sooner than NCCL's. Longer
messages are first summed by parts ("two shot"). See
https://docs.pytorch.org/docs/2.13/symmetric_memory.html.

Torch calls this alpha, and nobody has timed ours between GPUs yet (`benchmarks/gpu.sh` does). It is
used only if all ranks ask for it (SHARDWRIGHT_SYMMETRIC_MEMORY=1). A trial when ranks first meet
keeps only the kernels whose sums equal the backend's within rounding, with the same bits on each
rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import first_line
from shardwright.runtime.ranks.agreement import first_reason, gather
from shardwright.runtime.ranks.failure import named

LOG = logging.getLogger("shardwright")

ROOM = 8 << 20
"""Bytes that a rank lets others read, and the longest message that can use them."""

SHORT = 128 << 10
"""Most bytes for which one shot is tried first; Inductor's own limit in torch 2.13."""

ALIGNED = 16
"""A message is a multiple of this many bytes: what a thread of these kernels reads at once."""

DTYPES = (torch.bfloat16, torch.float32)

Sum = Callable[[Tensor], Tensor]
"""Sums a message in shared memory over the ranks; returns the same memory or new memory."""

_known: Any = WeakIdKeyDictionary()
"""Process group -> its symmetric memory, or None."""


class Symmetric:
    """Sums over a group through memory that its ranks share.

    Args:
        memory: This rank's memory, as bytes.
        ranks: The number of ranks.
        one_shot: Sums short messages into new memory; None if it must not be used.
        two_shot: Sums messages in place whose size is a multiple of `ALIGNED` times the ranks;
            None if it must not be used.
    """

    def __init__(
        self, memory: Tensor, ranks: int, one_shot: Sum | None, two_shot: Sum | None
    ) -> None:
        self._memory, self._ranks = memory, ranks
        self._one_shot, self._two_shot = one_shot, two_shot
        self._stream: torch.cuda.Stream | None = None

    def all_reduce(self, x: Tensor, op: str, spent: bool) -> Tensor | None:
        """Return the sum of a contiguous `x`, in place if `spent`; None if it is not supported.

        All ranks get None for the same calls, since their messages are equal in shape.
        """
        size = x.nbytes
        if op != "sum" or x.dtype not in DTYPES or not 0 < size <= len(self._memory):
            return None
        one_shot = self._one_shot if size <= SHORT and size % ALIGNED == 0 else None
        two_shot = self._two_shot if size % (ALIGNED * self._ranks) == 0 else None
        if one_shot is None and two_shot is None:
            return None
        if x.is_cuda and not self._in_turn():
            return None
        message = self._memory[:size].view(x.dtype).view(x.shape)
        message.copy_(x)
        if one_shot is not None:
            return one_shot(message)
        if two_shot is not None:
            two_shot(message)
        return x.copy_(message) if spent else message.clone()

    def _in_turn(self) -> bool:
        """Make this stream wait for the last one that used the memory; False in a captured graph.

        A captured graph may be replayed on any stream, next to anything else.
        """
        if torch.cuda.is_current_stream_capturing():
            return False
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        return True


def symmetric_of(group: dist.ProcessGroup) -> Symmetric | None:
    """Return a group's symmetric memory, if any. Its ranks must make the first call together.

    Raises:
        DistributedError: a rank died before all had it.
    """
    if group not in _known:
        _known[group] = _connected(group, torch.device("cuda", torch.cuda.current_device()))
    return _known[group]


def _connected(group: dist.ProcessGroup, device: torch.device) -> Symmetric | None:
    ranks = named(dist.get_process_group_ranks(group))
    memory, failure = None, first_reason("sharing GPU memory", _why_not(group, device), group)
    if failure is None:
        try:
            memory = _shared(group, device)
        except RuntimeError as error:
            failure = first_line(error)
        failure = first_reason("sharing GPU memory", failure, group)
    if memory is None or failure is not None:
        LOG.info("%s sum by their backend: %s", ranks, failure)
        return None
    sums = trusted(group, memory, _kernels(group))
    LOG.info("%s share GPU memory for %s", ranks, ", ".join(sums) or "nothing")
    if not sums:
        return None
    return Symmetric(memory, group.size(), sums.get("one shot"), sums.get("two shot"))


def _why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why this rank will not share memory; None if it will."""
    if os.environ.get("SHARDWRIGHT_SYMMETRIC_MEMORY", "0") in ("", "0"):
        return "SHARDWRIGHT_SYMMETRIC_MEMORY is not 1"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce"):
        return "this torch has no symmetric memory"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    if not isinstance(group._get_backend(device), dist.ProcessGroupNCCL):
        return f"{device} has a backend that is not NCCL"
    return None


def _shared(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return memory of this rank that the others may read. All ranks must call this."""
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(ROOM, dtype=torch.uint8, device=device)
    symmetric.rendezvous(memory, group)
    return memory


def _kernels(group: dist.ProcessGroup) -> dict[str, Sum]:
    ops, name = torch.ops.symm_mem, group.group_name
    return {
        "one shot": lambda message: ops.one_shot_all_reduce(message, "sum", name),
        "two shot": lambda message: ops.two_shot_all_reduce_(message, "sum", name),
    }


def trusted(group: dist.ProcessGroup, memory: Tensor, sums: Mapping[str, Sum]) -> dict[str, Sum]:
    """Return the `sums` that are right on this system, tried on all ranks.

    They are tried on short and long messages, several in a row.

    Args:
        group: The ranks, all of which must call this.
        memory: The memory that this rank shares.
        sums: Functions by name. One is left out if it fails, is not close to the backend's sum, or
            does not give the same bits on all ranks.
    """
    out = {}
    for name, work in sums.items():
        answers = gather(f"trying {name}", _tried(group, memory, work), group, str | None)
        if None not in answers and len(set(answers)) == 1:
            out[name] = work
    return out


def _tried(group: dist.ProcessGroup, memory: Tensor, work: Sum) -> str | None:
    """Return a digest of the bits of sums of random numbers; None if any is wrong or fails."""
    bits, right = sha256(), True
    seeded = torch.Generator().manual_seed(dist.get_rank(group))
    for dtype in DTYPES:
        for size in (ALIGNED * group.size(), SHORT, len(memory)):
            x = torch.randn(size // dtype.itemsize, generator=seeded).to(memory.device, dtype)
            want = x.to(torch.float32, copy=True)
            dist.all_reduce(want, group=group)
            close = torch.finfo(dtype).eps * group.size() * want.abs().max()
            message = memory[: x.nbytes].view(dtype)
            for factor in (1, 2, 4):  # written while others may still read the old values
                message.copy_(x * factor)
                try:
                    found = work(message).clone()
                except RuntimeError:
                    right = False  # go on, as the other ranks may
                    continue
                right &= bool((found.float() / factor - want).abs().max() <= close)
                bits.update(found.view(torch.uint8).cpu().numpy().tobytes())
    return bits.hexdigest() if right else None
