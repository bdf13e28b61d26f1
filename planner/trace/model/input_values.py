"""Values of inputs and of buffers, attached to tensors on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwright.planner.graph.buffer_values import value_of
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map

MAX_ELEMENTS, MAX_FLOATS = 1 << 14, 1 << 24
"""Values of tensors with this many elements or more are not kept."""


ByName = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Example inputs by name, of one call or of several."""


def calls_by_name(kwargs: ByName) -> list[dict[str, Any]]:
    """Return the inputs of each call, at least one, by name."""
    calls: Any = kwargs if isinstance(kwargs, (list, tuple)) else [kwargs or {}]
    return [dict(call) for call in calls] or [{}]


def remembered(value: Any, meta: torch.Tensor, floats: bool = False) -> torch.Tensor:
    """Return `meta` with `value` attached, if that is a small tensor of integers or bools.

    With `floats`, floating tensors are among them, and they may be larger.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return meta
    floating = value.is_floating_point()
    if value.is_complex() or (floating and not floats):
        return meta
    if value.numel() >= (MAX_FLOATS if floating else MAX_ELEMENTS):
        return meta
    meta = torch.empty_like(meta)
    meta.shardwright_value = value.detach().cpu().clone()  # type: ignore[attr-defined]
    return meta


def pairs(given: Any, made: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of `made` whose counterpart in `given` has a value, with that value."""
    for before, after in zip(tree_leaves(given), tree_leaves(made), strict=True):
        if isinstance(before, torch.Tensor) and (value := value_of(before)) is not None:
            yield after, value


def moved(given: Any) -> Any:
    """Return inputs on meta, with the values of integer tensors."""
    on_meta = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, given)
    return remember(given, on_meta) or on_meta


def remember(given: Any, on_meta: Any, floats: bool = False) -> Any:
    """Return `on_meta` with the values of integer tensors in `given`; None if there are none.

    With `floats`, it has the values of floating tensors too; None if there are none of these.
    """
    found = tree_map(
        lambda a, b: remembered(a, b, floats) if isinstance(b, torch.Tensor) else b, given, on_meta
    )
    kept = [value for _, value in pairs(found, found)]
    return found if any(value.is_floating_point() == floats for value in kept) else None
