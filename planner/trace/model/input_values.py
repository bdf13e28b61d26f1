"""Values of inputs, attached to tensors on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

MOST = 1 << 14
"""Values of tensors of integers with this many elements or more are not kept."""


def remembered(value: Any, meta: torch.Tensor, floats: bool = False) -> torch.Tensor:
    """Return `meta` with `value` attached, if that is a small integer or bool tensor with data.

    With `floats`, tensors of all dtypes and sizes get their values.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return meta
    large = value.numel() >= MOST or value.is_floating_point() or value.is_complex()
    if large and not floats:
        return meta
    meta = torch.empty_like(meta)
    meta.shardwright_value = value.detach().cpu().clone()  # type: ignore[attr-defined]
    return meta


def pairs(given: Any, made: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of `made` whose counterpart in `given` has a value, with that value."""
    for before, after in zip(tree_leaves(given), tree_leaves(made), strict=True):
        if (value := getattr(before, "shardwright_value", None)) is not None:
            yield after, value


def remember(given: Any, on_meta: Any, floats: bool = False) -> Any:
    """Return `on_meta` with the values of tensors in `given`; None if no more than without."""
    found = tree_map(
        lambda a, b: remembered(a, b, floats) if isinstance(b, torch.Tensor) else b, given, on_meta
    )
    valued = [value for _, value in pairs(found, found)]
    return found if any(v.is_floating_point() for v in valued) or (valued and not floats) else None
