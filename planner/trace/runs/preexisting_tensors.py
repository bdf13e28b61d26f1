"""What users make of a model's inputs before they call it: an encoder's states, say.

It is found on fake tensors, which know the values of whole numbers among the inputs, if any are.
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
"""From a model and inputs by name, which it may change, to what is made of them."""


class _Making(nn.Module):
    """Its forward is what makes something of inputs, with a model."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        super().__init__()
        self.model, self.make = model, make
        self.made: Any = None

    def forward(self, given: dict[str, Any]) -> None:
        self.made = self.make(self.model, given)


def made(model: nn.Module, make: Make, inputs: Mapping[str, Any]) -> Any:
    """What `make` makes of `inputs` with a copy of `model`, tensors on meta; None if it cannot."""
    with suppress(Exception), duplicated(model) as copied:  # it may want data, or other inputs
        making = _Making(copied, make)
        run_on_fake(making, [Run("", (dict(inputs),), {})], Opaque(making))
        return tree_map(_on_meta, making.made)
    return None


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
