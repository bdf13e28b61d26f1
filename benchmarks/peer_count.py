"""Counts every collective that code calls: transformers calls `dist.*` and DTensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.runtime.communication.audit import KINDS, Call

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs each start and stop
PREFIX = "c10d::"
"""Namespace of the torch ops that every collective ends in."""
C10D = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
}
"""Op -> our kind, and the argument with the input."""


class MissedError(Exception):
    """A collective ran that was not counted."""


@contextmanager
def every_collective() -> Iterator[list[Call]]:
    """Collect every collective that runs inside, as `count_collectives` does for our own layers.

    Raises:
        MissedError: torch's profiler, which sees the ops below, counted another number.
    """
    calls: list[Call] = []
    with profile(activities=[ProfilerActivity.CPU]) as seen, _Every(calls):
        yield calls
    below = [e.name for e in seen.events() or [] if _is_below(e) and not any(_around(e))]
    if len(below) != len(calls):
        raise MissedError(f"{len(calls)} collectives were counted, but torch ran {below}")


def _is_below(event: Any) -> bool:
    return event.name.startswith(PREFIX)


def _around(event: Any) -> Iterator[bool]:
    """Return whether each enclosing event is also such an op: redispatched ops appear twice."""
    while event := event.cpu_parent:
        yield _is_below(event)


class _Every(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return (
                NotImplemented  # its own dispatch runs first, and then calls this with its own ops
            )
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name in C10D:
            kind, entering = C10D[name]
            self.calls.append(Call(kind, _bytes(args[entering])))
        elif func.namespace.startswith("_c10d_functional") and name.rstrip("_") in KINDS:
            self.calls.append(Call(KINDS[name.rstrip("_")], _bytes(args[0])))
        return func(*args, **(kwargs or {}))


def _bytes(given: Any) -> int:
    tensors = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
