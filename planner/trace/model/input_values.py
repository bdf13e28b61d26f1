"""Values of inputs, attached to tensors on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

MOST = 1 << 14
"""Values of tensors with this many elements or more are not kept."""


def remembered(value: Any, meta: torch.Tensor) -> torch.Tensor:
    """Return `meta` with `value` attached, if that is a small integer or bool tensor with data."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() >= MOST:
        return meta
    if value.is_floating_point() or value.is_complex():
        return meta
    meta = torch.empty_like(meta)
    meta.shardwright_value = value.detach().cpu().clone()  # type: ignore[attr-defined]
    return meta


def pairs(given: Any, made: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of `made` whose counterpart in `given` has a value, with that value."""
    for before, after in zip(tree_leaves(given), tree_leaves(made), strict=True):
        if (value := getattr(before, "shardwright_value", None)) is not None:
            yield after, value


def remember(given: Any, on_meta: Any) -> Any:
    """Return `on_meta` with the values of integer tensors in `given`; None if there are none."""
    found = tree_map(
        lambda a, b: remembered(a, b) if isinstance(b, torch.Tensor) else b, given, on_meta
    )
    return found if any(True for _ in pairs(found, found)) else None
