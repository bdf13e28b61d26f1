"""`torch.distributed.checkpoint` of tensors that are `Arranged`: each piece of a rank is a chunk.

Torch asks a DTensor which box of the whole it holds. One that lies in an order of its own holds
several, and other ranks may hold some of the same rows, cut at other places: so all cut where any
does, and what several hold is one chunk to torch, written once. A checkpoint says nothing of
orders, and any other layout reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partialmethod
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.planner.contract.mesh import TP, mesh_dim_of
from shardwright.runtime.tensors.arranged import Arranged
from shardwright.runtime.tensors.ways import Ways, borders


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
