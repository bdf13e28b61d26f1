"""What a placement means, written with index sets and nothing of the runtime: the tests' yardstick.

`make` gives each rank's local tensor of a whole one; `check` puts local tensors together and
compares. The gradient of a tensor is laid out as `gradient(placement)` says.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shardwright.planner.contract.dims import local_ranges, resolve, uncovered_ranges
from shardwright.planner.contract.mesh import with_sub_axes
from shardwright.planner.contract.placement import Placement


def gradient(placement: Placement) -> Placement:
    """The placement of the gradient: of a grad-partial tensor, a partial one."""
    return Placement(placement.dims, partial=placement.grad_partial)


Sizes = dict[str, list[int]]


def all_coords(mesh: dict[str, int], sub_axes: Sizes | None = None):
    """The coordinates of every rank, in rank order."""
    ranks = itertools.product(*(range(n) for n in mesh.values()))
    plain = [{m: (r, mesh[m]) for m, r in zip(mesh, rank, strict=True)} for rank in ranks]
    return [with_sub_axes(coords, sub_axes or {}) for coords in plain]


def family(every, rank: int, m: str) -> list[int]:
    """The ranks that stand where `rank` does but for `m`, in their order on it."""
    finest = [n for n in every[0] if not any(o.startswith(f"{n}.") for o in every[0])]
    single = [n for n in finest if len(n.partition(".")[2]) < 2]
    dim, _, digits = m.partition(".")
    moving = {n for n in single if n.partition(".")[0] == dim}
    if digits:
        moving = {n for n in moving if n.partition(".")[2] in digits}
    alike = [
        r
        for r, c in enumerate(every)
        if all(c[n] == every[rank][n] or n in moving for n in c if n in single)
    ]
    return sorted(alike, key=lambda r: every[r][m])


def index(placement: Placement, shape, coords) -> list[Tensor]:
    """The indices held along each dimension."""
    dims = [resolve(d, n) for d, n in zip(placement.dims, shape, strict=True)]
    return [
        torch.tensor([i for a, b in local_ranges(d, coords) for i in range(a, b)], dtype=torch.long)
        for d in dims
    ]


def cut(x: Tensor, placement: Placement, coords) -> Tensor:
    """The part of whole `x` that a rank holds, pending sums aside."""
    for dim, held in enumerate(index(placement, x.shape, coords)):
        x = x.index_select(dim, held)
    return x


def pending(placement: Placement, shape, m: str) -> Tensor:
    """Where a sum over `m` is pending: all that `m` does not split. Whole shape, bool."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, (d, n) in enumerate(zip(placement.dims, shape, strict=True)):
        free = torch.zeros(n, dtype=torch.bool)
        for a, b in uncovered_ranges(resolve(d, n), m):
            free[a:b] = True
        mask &= free.view([-1 if i == dim else 1 for i in range(len(shape))])
    return mask


def make(
    x: Tensor,
    placement: Placement,
    mesh: dict[str, int],
    seed: int = 0,
    sub_axes: Sizes | None = None,
) -> list[Tensor]:
    """Local tensors of whole `x`; pending sums are split into random terms."""
    torch.manual_seed(seed)
    every = all_coords(mesh, sub_axes)
    terms = [x.clone() for _ in every]
    for m in placement.partial:
        mask = pending(placement, x.shape, m)
        for rank, coords in enumerate(every):
            if coords[m][0]:
                continue
            ranks = family(every, rank, m)
            noise = [torch.randn_like(x) for _ in ranks[1:]]
            for r, value in zip(ranks, [terms[rank] - sum(noise), *noise], strict=True):
                terms[r] = torch.where(mask, value, terms[r])
    return [cut(t, placement, c) for t, c in zip(terms, every, strict=True)]


def check(
    locals_: list[Tensor],
    x: Tensor,
    placement: Placement,
    mesh: dict[str, int],
    sub_axes: Sizes | None = None,
) -> None:
    """Assert that local tensors are those of whole `x` (each sum pending or done as it says)."""
    every = all_coords(mesh, sub_axes)
    whole = []
    for local, coords in zip(locals_, every, strict=True):
        grid = torch.meshgrid(*index(placement, x.shape, coords), indexing="ij")
        assert local.shape == grid[0].shape, (local.shape, grid[0].shape)
        filled = torch.full_like(x, float("nan"))
        filled[grid] = local.to(x.dtype)
        whole.append(filled)
    for m in placement.partial:
        mask = pending(placement, x.shape, m)
        summed = []
        for rank in range(len(every)):
            summed.append(sum(whole[r] for r in family(every, rank, m)))
        whole = [torch.where(mask, s, w) for s, w in zip(summed, whole, strict=True)]
    for filled in whole:
        known = ~filled.isnan()
        torch.testing.assert_close(filled[known], x[known])
