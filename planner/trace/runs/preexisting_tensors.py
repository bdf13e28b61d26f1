"""Inputs that users compute with a part of the model before they call it, such as encoder states.

They are computed on fake tensors, which know the values of integer inputs if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.fake_tensor_bridge import run_on_fake

Make = Callable[[Any, dict[str, Any]], Any]
"""Function of a model and a dict of inputs (which it may change) that returns what it computes."""


class _Making(nn.Module):
    """A module whose forward calls `make` with a model and inputs."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        super().__init__()
        self.model, self.make = model, make
        self.made: Any = None

    def forward(self, given: dict[str, Any]) -> None:
        self.made = self.make(self.model, given)


def made(model: nn.Module, make: Make, inputs: Mapping[str, Any]) -> Any:
    """Return `make(copy of model, inputs)` with tensors on meta; None if it raises."""
    with suppress(Exception):  # `make` may need data or other inputs
        return made_or_raised(model, make, inputs)
    return None


def made_or_raised(model: nn.Module, make: Make, inputs: Mapping[str, Any]) -> Any:
    """Do the same as `made`, but raise what `make` raises."""
    with duplicated(model) as copied:
        making = _Making(copied, make)
        run_on_fake(making, [Run("", (dict(inputs),), {})], Opaque(making))
        return tree_map(_on_meta, making.made)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
