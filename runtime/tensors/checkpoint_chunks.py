"""`torch.distributed.checkpoint` of SplitTensors: each range of rows that a rank holds is a chunk.

Torch expects a DTensor to hold one box of the full tensor. A SplitTensor may hold several, and
ranks may share rows within different ranges. Therefore all ranks cut at the boundaries of every
rank. A box that several ranks hold is then one chunk, and is written once. A checkpoint contains no
placements, so it can be read with any other placements.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.runtime.tensors.layouts import boundaries, place_of, shards_of


class Chunk(NamedTuple):
    """A box of the full tensor: its offsets and sizes, and its offsets in the local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    at: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The box in the local tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def chunks(tensor: DTensor) -> list[Chunk]:
    """The chunks of `tensor` that this rank holds."""
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


def write_items(tensor: DTensor, fqn: str, value: Any = None) -> list[Any]:
    """Torch's write items for the chunks of `tensor`, which torch also gives as `value`."""
    # Imported here because it takes a quarter of a second.
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
    """The chunks as torch's metadata."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(c.offsets, c.sizes) for c in chunks(tensor)]


def shard_at(tensor: DTensor, index: Any) -> Tensor:
    """The chunk at `index`, as a view of the local tensor."""
    (chunk,) = (c for c in chunks(tensor) if c.offsets == index.offset)
    return chunk.of(tensor._local_tensor.detach())
