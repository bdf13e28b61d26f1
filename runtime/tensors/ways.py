"""Which indices of a dim the ranks of a DeviceMesh hold, where torch does not know their order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.planner.contract.dims import Range, local_ranges
from shardwright.planner.contract.mesh import TP, Coords, mesh_dim_of, with_sub_axes
from shardwright.planner.contract.notation import parse


class Ways(NamedTuple):
    """How one dim lies over a mesh: by a layout, then cut as `torch.chunk` does by FSDP2."""

    layout: str
    dim: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cut: tuple[int, ...]
    """Dims of the mesh over which FSDP2 cuts it."""

    def held(self, place: Sequence[int]) -> list[Range]:
        """What the rank at `place` of the mesh holds, in its order."""
        ranges = local_ranges(parse(self.layout).dims[self.dim], self._coords(place))
        for i in self.cut:
            ranges = _part(ranges, place[i], self.sizes[i])
        return ranges

    def _coords(self, place: Sequence[int]) -> Coords:
        mine = [i for i, name in enumerate(self.names) if mesh_dim_of(name) == TP]
        rank, ranks = 0, 1
        for i in mine:
            rank, ranks = rank * self.sizes[i] + place[i], ranks * self.sizes[i]
        sub_axes = {TP: [self.sizes[i] for i in mine]} if len(mine) > 1 else {}
        return with_sub_axes({TP: (rank, ranks)}, sub_axes)


@lru_cache(maxsize=1 << 10)
def around(ways: Ways, place: tuple[int, ...], over: tuple[int, ...]) -> Tensor:
    """What the rank at `place` holds together with those that differ from it over dims `over`.

    Indices of the dim of `ways`, none twice, in their order.
    """
    every = [range(n) if i in over else [place[i]] for i, n in enumerate(ways.sizes)]
    held = {found for at in product(*every) for found in ways.held(at)}
    return torch.cat([torch.arange(0), *(torch.arange(*found) for found in held)]).unique()


@cache
def borders(ways: Ways) -> frozenset[int]:
    """Where any rank begins or ends a range."""
    places = product(*map(range, ways.sizes))
    return frozenset(at for place in places for found in ways.held(place) for at in found)


def _part(ranges: Sequence[Range], rank: int, ranks: int) -> list[Range]:
    """The part of the indices in `ranges` that `torch.chunk` gives to a rank."""
    share = -(-sum(stop - start for start, stop in ranges) // ranks)
    first, last, before, out = rank * share, (rank + 1) * share, 0, []
    for start, stop in ranges:
        a, b = max(start, start + first - before), min(stop, start + last - before)
        before += stop - start
        if a < b:
            out.append((a, b))
    return out
