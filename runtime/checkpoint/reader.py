"""Reads parts of stored tensors, and of expressions of them, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.planner.contract.dims import Range
from shardwright.runtime.checkpoint.expressions import Copy, Index, part, place
from shardwright.runtime.checkpoint.mapped import pieces
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.source import Checkpoint


class Reader:
    """Reads parts of a checkpoint's tensors. A context manager that unmaps the files at its end.

    Args:
        checkpoint: where the tensors are.
        copy: copies what was read to its place.

    Attributes:
        read: bytes read so far.
    """

    def __init__(self, checkpoint: Checkpoint, copy: Copy = Tensor.copy_) -> None:
        self.read = 0
        self._copy = copy
        self._tensors = checkpoint.tensors
        self._files = checkpoint.files

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.release()

    def get(self, source: Source, box: Box) -> Tensor:
        """Return what the rank holds of `box` of `source`.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if source.made is None:
            return self._box(source.key, box)
        return part(source.made, _index(box), self._part)

    def fill(self, target: Tensor, source: Source, box: Box) -> None:
        """Copy what the rank holds of `box` of `source` to its place in `target`.

        Raises:
            CheckpointError: a file cannot be read.
        """
        to = target[inside(box)]
        if source.made is None:
            self._copy(to, self._box(source.key, box))
        else:
            place(source.made, _index(box), self._part, to, self._copy)

    def mapped(self, source: Source, ranges: Sequence[Sequence[Range]]) -> Tensor | None:
        """Return a rank's part of `source` as a view of the mapped file; None if not possible.

        Args:
            source: where the tensor comes from; None is returned for an expression.
            ranges: per dimension, the ascending ranges of indices that the rank holds.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if source.made is not None:
            return None
        entry = self._tensors[source.key]
        size = entry.dtype.itemsize
        where = [(entry.offset + a * size, n * size) for a, n in pieces(ranges, entry.shape, size)]
        if not where:
            return None
        with _reading(entry.file):
            flat = self._files[entry.file].joined(where, entry.dtype)
        if flat is None:
            return None
        self.read += flat.nbytes
        return flat.view([sum(b - a for a, b in dim) for dim in ranges])

    def _part(self, key: str, index: Index) -> Tensor:
        """Return the stored tensor `key` at `index`, whose indices may be in any order."""
        entry = self._tensors[key]
        ordered = [i if _ascends(i) else i.sort().values for i in index]
        pieces = list(boxes([_ranges(i) for i in ordered], entry.dtype.itemsize))
        if len(pieces) == 1:
            out = self._box(key, pieces[0])
        else:
            out = torch.empty([len(i) for i in index], dtype=entry.dtype)
            for box in pieces:
                out[inside(box)].copy_(self._box(key, box))
        for d, i in enumerate(index):
            if ordered[d] is not i:
                out = out.index_select(d, i.argsort().argsort())
        return out

    def _box(self, key: str, box: Box) -> Tensor:
        entry = self._tensors[key]
        self.read += box_bytes(box, entry.dtype.itemsize)
        with _reading(entry.file):
            flat = self._files[entry.file].read(entry.offset, entry.nbytes, entry.dtype)
        return get(flat.view(entry.shape), box)


def _index(box: Box) -> Index:
    return tuple(torch.arange(s.start, s.stop) if s.picked is None else s.picked for s in box)


def inside(box: Box) -> tuple[slice, ...]:
    """Return where the box is in the local tensor."""
    return tuple(slice(s.to, s.to + s.held) for s in box)


def get(slab: Any, box: Box) -> Tensor:
    """Return what the rank holds of `box` of a full tensor."""
    piece = slab[tuple(slice(s.start, s.stop) for s in box)]
    for dim, span in enumerate(box):
        if span.picked is not None:
            piece = piece.index_select(dim, span.picked - span.start)
    return piece


def _ascends(index: Tensor) -> bool:
    return bool((index.diff() > 0).all())


def _ranges(index: Tensor) -> list[Range]:
    """Return the runs of consecutive indices in ascending `index`."""
    cuts = (torch.where(index.diff() != 1)[0] + 1).tolist()
    bounds = [0, *cuts, len(index)]
    starts = index[bounds[:-1]].tolist()
    ends = (index[[b - 1 for b in bounds[1:]]] + 1).tolist()
    return list(zip(starts, ends, strict=True))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error}): fetch the file again") from None


CHUNK = 8 * 2**20
"""Most bytes per read, unless a single element is larger."""
MANY = 32
"""If there are more ranges than this, small ones are read as one slice that covers them all."""
SMALL = 2**16
"""Ranges of fewer bytes than this are not worth a separate read."""


@dataclass(frozen=True)
class Span:
    """A slice of one dimension, held in full or at the indices `picked`, stored from `to` on."""

    start: int
    stop: int
    to: int
    picked: torch.Tensor | None = None

    @property
    def held(self) -> int:
        """Return how many of the indices the rank holds."""
        return self.stop - self.start if self.picked is None else len(self.picked)

    def split(self, parts: int) -> Iterator[Span]:
        """Cut the span into `parts` spans with about equally many held indices."""
        for i in range(parts):
            a, b = self.held * i // parts, self.held * (i + 1) // parts
            if self.picked is None:
                yield Span(self.start + a, self.start + b, self.to + a)
            else:
                yield _picking(self.picked[a:b], self.to + a)


Box = tuple[Span, ...]


def _picking(indices: torch.Tensor, to: int) -> Span:
    return Span(int(indices[0]), int(indices[-1]) + 1, to, indices)


def boxes(ranges: Sequence[Sequence[Range]], itemsize: int, chunk: int = CHUNK) -> Iterator[Box]:
    """Yield boxes that together cover the held `ranges` of each dimension once.

    Args:
        ranges: per dimension, the ascending ranges of indices that the rank holds.
        itemsize: bytes of one element.
        chunk: most bytes per box, unless one element is larger.
    """
    held = [sum(b - a for a, b in dim) for dim in ranges]
    if 0 in held:
        return
    whole = prod(held) * itemsize
    spans = [_spans(dim, whole // len(dim)) for dim in ranges]
    for box in product(*spans):
        yield from _bounded(box, itemsize, chunk)


def _spans(ranges: Sequence[Range], nbytes: int) -> list[Span]:
    """Return the spans to read of one dimension whose ranges have about `nbytes` each."""
    if len(ranges) > MANY and nbytes < SMALL:
        return [_picking(torch.cat([torch.arange(a, b) for a, b in ranges]), 0)]
    out: list[Span] = []
    to = 0
    for a, b in ranges:
        out.append(Span(a, b, to))
        to += b - a
    return out


def box_bytes(box: Box, itemsize: int) -> int:
    """Return how many bytes reading `box` takes."""
    return prod(s.stop - s.start for s in box) * itemsize


def _bounded(box: Box, itemsize: int, chunk: int) -> Iterator[Box]:
    """Cut `box` along its outermost dimensions, so that each piece is contiguous in the file."""
    size = box_bytes(box, itemsize)
    dim = next((d for d, span in enumerate(box) if span.held > 1), None)
    if size <= chunk or dim is None:
        yield box
        return
    for span in box[dim].split(min(ceil(size / chunk), box[dim].held)):
        yield from _bounded((*box[:dim], span, *box[dim + 1 :]), itemsize, chunk)
