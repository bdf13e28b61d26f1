"""`torch.distributed.checkpoint` of tensors that are `Arranged`: each piece of a rank is a chunk.

Torch asks a DTensor which box of the whole it holds. One that lies in an order of its own holds
several, and other ranks may hold some of the same rows, cut at other places: so all cut where any
does, and what several hold is one chunk to torch, written once. A checkpoint says nothing of
orders, and any other layout reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partialmethod
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.planner.contract.dims import Range
from shardwright.planner.contract.mesh import TP, Coords, mesh_dim_of, with_sub_axes
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.ranges import local_ranges
from shardwright.runtime.arranged import Arranged


class Piece(NamedTuple):
    """A box of the whole that a rank holds in one piece, and where in its local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    at: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """Its part of the local tensor, which shares its memory."""
        for dim, (start, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


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


def pieces(tensor: DTensor) -> list[Piece]:
    """What this rank holds of a tensor that is arranged."""
    mesh, placements = tensor.device_mesh, cast("tuple[Any, ...]", tensor.placements)
    names, sizes = tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)
    layout = next(p.layout for p in placements if isinstance(p, Arranged))
    around = [i for i, name in enumerate(names) if mesh_dim_of(name) != TP]
    place, dims = mesh.get_coordinate(), []
    assert place is not None, "a rank saves what it holds"
    for dim in range(tensor.dim()):
        cut = tuple(i for i in around if not placements[i].is_replicate())
        cut = tuple(i for i in cut if placements[i].dim == dim)
        ways, found, at = Ways(layout, dim, names, sizes, cut), [], 0
        for start, stop in ways.held(place):
            inner = sorted(b for b in borders(ways) if start < b < stop)
            found += [(a, b - a, at + a - start) for a, b in pairwise([start, *inner, stop])]
            at += stop - start
        dims.append(found)
    boxes = (zip(*box, strict=True) for box in product(*dims))
    return [Piece(torch.Size(o), torch.Size(n), tuple(at)) for o, n, at in boxes]


@cache
def watch_checkpoints() -> None:
    """From now on, torch hears of all pieces of a tensor that is arranged."""
    for name, ours in _OURS.items():
        setattr(DTensor, name, partialmethod(_asked, getattr(DTensor, name), ours))


def _asked(self: DTensor, theirs: Callable[..., Any], ours: Callable[..., Any], *args: Any) -> Any:
    arranged = any(isinstance(p, Arranged) for p in self.placements)
    return (ours if arranged else theirs)(self, *args)


def _write_items(tensor: DTensor, fqn: str, _: Any) -> list[Any]:
    # Imported here, as torch's checkpoints take long to import: a quarter of a second.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.shape),
        )
        for chunk in _chunk_list(tensor)
    ]


def _chunk_list(tensor: DTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(p.offsets, p.sizes) for p in pieces(tensor)]


def _shard(tensor: DTensor, index: Any) -> Tensor:
    (piece,) = (p for p in pieces(tensor) if p.offsets == index.offset)
    return piece.of(tensor._local_tensor.detach())


_OURS = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunk_list,
    "__get_tensor_shard__": _shard,
}
