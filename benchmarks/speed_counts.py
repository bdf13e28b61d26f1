"""Counts what a piece of code does independently of the machine: calls, copies, allocations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.peer_count import every_collective
from shardwright.runtime.communication.audit import Call, count_collectives, total_bytes

COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "contiguous", "repeat"}
"""ATen ops that only copy existing values."""

Counts = dict[str, int]


def counted(work: Callable[[], Any], ours: bool) -> Counts:
    """Return the counts of one call of `work`, which is run a few times, on all ranks together.

    Args:
        work: what is counted, the same each time.
        ours: whether its collectives are this project's, which `count_collectives` sees.
    """
    out = {"python_calls": _python_calls(work)}
    with _Ops() as ops:
        work()
    out |= {"aten_calls": ops.calls, "copies": ops.copies, "allocations": ops.allocations}
    calls: list[Call]
    with count_collectives() if ours else every_collective() as calls:
        work()
    return out | {"collectives": len(calls), "bytes": sum(total_bytes(calls).values())}


def _python_calls(work: Callable[[], Any]) -> int:
    seen: Counter[str] = Counter()

    def note(_: Any, event: str, __: Any) -> None:
        seen[event] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen["call"]


class _Ops(TorchDispatchMode):
    """Counts ATen calls on local tensors, including views but not collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.copies = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch runs first, and then calls this
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.calls += 1
            self.copies += func._schema.name.split("::")[1] in COPIES
            given = {_storage(x) for x in tree_leaves((args, kwargs)) if _plain(x)}
            made = {_storage(x) for x in tree_leaves(out) if _plain(x)}
            self.allocations += len(made - given)
        return out


def _plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and not x.is_meta


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
