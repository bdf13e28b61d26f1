"""`torch.distributed.checkpoint` of SplitTensors: each range of rows that a rank holds is a chunk.

Torch asks a DTensor which box of the full tensor it holds. One that a plan laid out may hold
several, and other ranks may hold some of the same rows, with other boundaries: so all ranks cut
where any does, and what several hold is one chunk to torch, written once. A checkpoint says nothing
of layouts, and any other layout reads it.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.runtime.tensors.layouts import boundaries, place_of, shards_of


class Chunk(NamedTuple):
    """A box of the full tensor that a rank holds in one piece, and where in its local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    at: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """Its part of the local tensor, which shares its memory."""
        for dim, (start, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def chunks(tensor: DTensor) -> list[Chunk]:
    """What this rank holds of it."""
    place = place_of(tensor._spec)
    dims = [[(0, size, 0)] for size in tensor.shape]
    for shards in shards_of(tensor._spec):
        found, at = [], 0
        for start, stop in shards.held(place):
            inner = sorted(b for b in boundaries(shards) if start < b < stop)
            found += [(a, b - a, at + a - start) for a, b in pairwise([start, *inner, stop])]
            at += stop - start
        dims[shards.dim] = found
    boxes = (zip(*box, strict=True) for box in product(*dims))
    if not dims:
        return [Chunk(torch.Size(), torch.Size(), ())]
    return [Chunk(torch.Size(o), torch.Size(n), tuple(at)) for o, n, at in boxes]


def write_items(tensor: DTensor, fqn: str) -> list[Any]:
    """What torch is to write of it."""
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
        for chunk in chunk_list(tensor)
    ]


def chunk_list(tensor: DTensor) -> list[Any]:
    """The boxes as torch's metadata have them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(c.offsets, c.sizes) for c in chunks(tensor)]


def shard_at(tensor: DTensor, index: Any) -> Tensor:
    """The chunk that `index` names, which shares the memory of the local tensor."""
    (chunk,) = (c for c in chunks(tensor) if c.offsets == index.offset)
    return chunk.of(tensor._local_tensor.detach())
