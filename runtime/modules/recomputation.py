"""Blocks that drop their activations in training, and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes of blocks of transformers: whether they do so, and how."""


def recomputes(block: nn.Module) -> bool:
    """Return whether a block can do so, as those of transformers can."""
    return hasattr(type(block), FLAG)


def recompute_blocks(model: nn.Module, firsts: Mapping[str, int]) -> None:
    """Have the first blocks of some lists of blocks do so, in place.

    Args:
        model: The model.
        firsts: List of blocks -> how many of them.
    """
    for path, count in firsts.items():
        for block in [*model.get_submodule(path).children()][:count]:
            setattr(block, FUNCTION, partial(checkpoint, use_reentrant=False))
            setattr(block, FLAG, True)
