"""Files of parts: what writes tensors by safetensors, as peft does, is told to write whole ones."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError


@cache
def watch_storages() -> None:
    """From now on, a DTensor that is asked for its storage says what to write instead.

    It has none that can be read. safetensors, and peft ahead of it, ask before they write anything.
    """
    DTensor.storage = _refuse  # type: ignore[method-assign]


def _refuse(self: Any) -> NoReturn:
    raise UsageError(
        "the storage of a DTensor is wanted, of which this rank has a part: write whole tensors "
        "with shardwright.save(model, directory), adapters too, or take them with "
        "shardwright.full_tensors"
    )
