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
from shardwright.planner.contract.names import CACHE_NAMES

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes of blocks of transformers: whether they are computed again, and by what."""


def is_cache(name: str, value: Any) -> bool:
    """Whether an argument of such a block is a cache: it gets None, or would be filled twice.

    What has the newest name may be something else, so there the class must be one of transformers.
    """
    kinds = (kind.__module__ for kind in type(value).__mro__)
    return name in CACHE_NAMES and (name != CACHE_NAMES[0] or "transformers.cache_utils" in kinds)


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
    given = [None if is_cache(name, x) else x for name, x in zip_longest(names, args)]
    more = code.keywords if isinstance(code, partial) else {}
    without = {name: None for name, x in more.items() if is_cache(name, x)}
    return checkpoint(partial(code, **without), *given, use_reentrant=False)
