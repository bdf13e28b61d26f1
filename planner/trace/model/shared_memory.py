"""Tensors of a model that share memory with a parameter or buffer, but are other tensors.

An example is `self.flat = self.weight.detach().view(-1)`. Copies on meta, and the parts of a split
model, share no memory: code that uses such a tensor is refused where this would matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

ATTRIBUTE = "_shardwright_shares"
"""Attribute of a tensor on meta that holds its `Shares`."""


class Shares(NamedTuple):
    """The parameter or buffer with which another tensor shares memory, and whether it trains."""

    name: str
    trains: bool


def note_shared(module: nn.Module, on_meta: nn.Module) -> None:
    """Note on buffers and plain attributes of a copy `on_meta` with what those of `module` share.

    Parameters that share memory with each other are not noted.
    """
    copies = dict(on_meta.named_modules())
    first: dict[StorageWeakRef, tuple[Tensor, Shares]] = {}
    for store in ("_parameters", "_buffers", "__dict__"):
        for place, path, name, tensor in _tensors(module, store):
            memory = StorageWeakRef(tensor.untyped_storage())
            if store != "__dict__" and memory not in first:
                first[memory] = tensor, Shares(place, tensor.requires_grad)
            owner, shares = first.get(memory, (tensor, None))
            copied = getattr(copies.get(path), store, {}).get(name)
            if owner is not tensor and store != "_parameters" and isinstance(copied, Tensor):
                setattr(copied, ATTRIBUTE, shares)


def shares(tensor: Tensor) -> Shares | None:
    """Return with what a tensor of a model on meta shares memory in the model."""
    return getattr(tensor, ATTRIBUTE, None)


def _tensors(module: nn.Module, store: str) -> Iterator[tuple[str, str, str, Tensor]]:
    for path, part in module.named_modules():
        for name, value in getattr(part, store).items():
            if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
                yield f"{path}.{name}".lstrip("."), path, name, value
