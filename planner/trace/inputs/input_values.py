"""Values of inputs: tensors on meta that remember what they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

MOST = 1 << 14
"""Elements from which on values are not kept."""


def remembered(value: Any, meta: torch.Tensor) -> torch.Tensor:
    """`meta`, which remembers `value` if those are whole numbers or truths, and not too many."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() >= MOST:
        return meta
    if value.is_floating_point() or value.is_complex():
        return meta
    meta = torch.empty_like(meta)
    meta.shardwright_value = value.detach().cpu().clone()  # type: ignore[attr-defined]
    return meta


def pairs(given: Any, made: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of `made` whose like in `given` remembers a value, and that."""
    for before, after in zip(tree_leaves(given), tree_leaves(made), strict=True):
        if (value := getattr(before, "shardwright_value", None)) is not None:
            yield after, value


def remember(given: Any, on_meta: Any) -> Any:
    """Inputs on meta that remember the whole numbers in `given`; None if there are none."""
    found = tree_map(
        lambda a, b: remembered(a, b) if isinstance(b, torch.Tensor) else b, given, on_meta
    )
    return found if any(True for _ in pairs(found, found)) else None
