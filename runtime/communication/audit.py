"""Records the collectives that a piece of code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.runtime.communication.collectives import Listener

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class Call(NamedTuple):
    """One collective: its kind and its input bytes on this rank."""

    kind: str
    bytes: int


@contextmanager
def count_collectives() -> Iterator[list[Call]]:
    """Collect every collective that runs inside, forward and backward, in order.

    Example:
        with count_collectives() as calls:
            model(ids).logits.sum().backward()
        assert counts(calls) == {"all_reduce": 4}
    """
    calls: list[Call] = []
    with _Listen(calls):
        yield calls


def counts(calls: list[Call]) -> dict[str, int]:
    """Count the collectives by kind."""
    return {kind: sum(c.kind == kind for c in calls) for kind in sorted({c.kind for c in calls})}


def total_bytes(calls: list[Call]) -> dict[str, int]:
    """Sum the input bytes by kind."""
    kinds = sorted({c.kind for c in calls})
    return {kind: sum(c.bytes for c in calls if c.kind == kind) for kind in kinds}


class _Listen(Listener):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def note(self, kind: str, x: Tensor) -> None:
        self.calls.append(Call(kind, x.numel() * x.element_size()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":  # an op of a compiled graph
            kind = KINDS.get(func._schema.name.split("::")[1].rstrip("_"))
            if kind and isinstance(args[0], torch.Tensor):
                self.note(kind, args[0])
        return func(*args, **(kwargs or {}))
