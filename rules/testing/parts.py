"""Shards of tensors if axes of a rule are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..notation import Dims, Expr, Product, Rule, expr_size, letters

Parts = Mapping[str, torch.Tensor]
"""Sharded axis -> the indices that a rank holds."""

Split = list[Parts]
"""The `Parts` of each rank."""


def partition(rule: Rule, axes: Iterable[str], ranks: int, seed: int, granule: int = 1) -> Split:
    """Split each axis at random into ordered, non-empty parts, at multiples of `granule`."""
    generator = torch.Generator().manual_seed(seed)
    split: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for axis in axes:
        n = rule.sizes[axis]
        cuts = torch.randperm(n // granule - 1, generator=generator)[: ranks - 1].sort().values
        ends = granule * (cuts + 1)
        for rank, held in enumerate(torch.arange(n).tensor_split(ends.tolist())):
            split[rank][axis] = held
    return list(split)


def take(tensor: torch.Tensor, dims: Dims, sizes: Mapping[str, int], parts: Parts) -> torch.Tensor:
    """Return the shard of `tensor` that a rank holds."""
    for d, expr in enumerate(dims):
        if any(a in parts for a in letters(expr)):
            tensor = tensor.index_select(d, indices(expr, sizes, parts))
    return tensor


def add_at(
    total: torch.Tensor, part: torch.Tensor, dims: Dims, sizes: Mapping[str, int], parts: Parts
) -> None:
    """Add the shard `part` of a rank to `total`."""
    if any(a in parts for expr in dims for a in letters(expr)):
        held = [indices(expr, sizes, parts) for expr in dims]
        grid = torch.meshgrid(*held, indexing="ij")
        total.index_put_(grid, part, accumulate=True)
    else:
        total += part


def indices(expr: Expr, sizes: Mapping[str, int], parts: Parts) -> torch.Tensor:
    """Return the indices of a dim that a rank holds."""
    if isinstance(expr, str):
        return parts[expr] if expr in parts else torch.arange(expr_size(expr, sizes))
    held, before = torch.zeros(int(isinstance(expr, Product)), dtype=torch.long), 0
    for child in expr.factors if isinstance(expr, Product) else expr.terms:
        inner, n = indices(child, sizes, parts), expr_size(child, sizes)
        if isinstance(expr, Product):
            held = (held[:, None] * n + inner).flatten()
        else:
            held = torch.cat([held, before + inner])
            before += n
    return held


def covered(expr: Expr, sizes: Mapping[str, int], split: Parts) -> torch.Tensor:
    """Return a mask of the elements of a dim that belong to a sharded axis."""
    if isinstance(expr, str):
        return torch.full((expr_size(expr, sizes),), expr in split)
    if isinstance(expr, Product):
        out = torch.zeros(1, dtype=torch.bool)
        for child in expr.factors:
            out = (out[:, None] | covered(child, sizes, split)).flatten()
        return out
    return torch.cat([covered(t, sizes, split) for t in expr.terms])
