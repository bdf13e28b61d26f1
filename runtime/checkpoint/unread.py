"""A model without a checkpoint: random numbers for its parameters, to measure with."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from shardwright.runtime.checkpoint.load import put

SPREAD = 0.02
"""Standard deviation, as most models are initialised with."""


def without_weights(model: nn.Module, device: torch.device | str) -> None:
    """Make all parameters and buffers of `model` that are on meta real, and move all to `device`.

    Numbers depend on names alone, so they are the same on each rank where shapes are; tied names
    go on sharing one parameter.
    """
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        for name, tensor in named(model, remove_duplicate=False):
            groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    for tensor, names in groups.values():
        if not tensor.is_meta:
            put(modules, names, tensor.detach().to(device))
            continue
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if made.is_floating_point() or made.is_complex():
            generator = torch.Generator(device).manual_seed(zlib.crc32(names[0].encode()))
            made.normal_(0, SPREAD, generator=generator)
        put(modules, names, made)
