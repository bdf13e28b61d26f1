"""Blocks that drop their activations in training, and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import PlanError

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes of blocks of transformers: whether they are computed again, and by what."""
CACHES = ("past_key_values", "layer_past", "cache_params")
"""Arguments for which such blocks get None: a second run would fill a cache twice."""


def recomputable(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the lists of modules that are all blocks which can be computed again."""
    lists = {
        path: [*m.children()] for path, m in model.named_modules() if isinstance(m, nn.ModuleList)
    }
    return {p: b for p, b in lists.items() if b and all(hasattr(type(x), FLAG) for x in b)}


def recompute_blocks(model: nn.Module, firsts: Mapping[str, int]) -> None:
    """Have the first blocks of some lists computed again in the backward pass, in place.

    Args:
        model: The model.
        firsts: List of blocks -> how many of them.

    Raises:
        PlanError: there are no such blocks.
    """
    found = recomputable(model) if firsts else {}
    for path, count in firsts.items():
        blocks = found.get(path, [])
        if count > len(blocks):
            raise PlanError(
                f"workload.recomputed: '{path:.80}' has {len(blocks)} blocks that can be computed "
                f"again, not {count}"
            )
        for block in blocks[:count]:
            setattr(block, FUNCTION, _again)
            setattr(block, FLAG, True)


def _again(code: Callable[..., Any], *args: Any) -> Any:
    """Run a block's code without a cache, now and for the backward pass.

    Transformers leaves out caches itself, unless they are given by position.
    """
    names = [*signature(code).parameters][: len(args)]
    given = [None if name in CACHES else x for name, x in zip_longest(names, args)]
    more = code.keywords if isinstance(code, partial) else {}
    without = {name: None for name in more if name in CACHES}
    return checkpoint(partial(code, **without), *given, use_reentrant=False)
