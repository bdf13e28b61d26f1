"""Reads parts of stored tensors, and of expressions of them, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.planner.contract.dims import Range
from shardwright.runtime.checkpoint import expressions
from shardwright.runtime.checkpoint.expressions import Copy, Expression, Index
from shardwright.runtime.checkpoint.mapped import pieces
from shardwright.runtime.checkpoint.memory import release_freed
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.quantized import layout
from shardwright.runtime.quantized.kept import Held, KeptWeight, Piece, StoredTensor
from shardwright.runtime.quantized.layout import Mismatch, QuantizedWeight
from shardwright.runtime.redistribution.split import indices


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
        self._computed = 0
        self._copy = copy
        self._tensors = checkpoint.tensors
        self._stored = checkpoint.stored
        self._quantized = checkpoint.quantized
        self._quantization = checkpoint.quantization
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
        return expressions.part(
            self._expression(source), tuple(index for _, index in box), self._part
        )

    @torch.no_grad()
    def fill(self, target: Tensor, source: Source, ranges: Sequence[Sequence[Range]]) -> None:
        """Copy the rank's part of `source` to `target`, a bounded piece at a time.

        Raises:
            CheckpointError: a file cannot be read.
        """
        made = self._expression(source)
        quantized = any(key in self._quantized for key in expressions.stored(made))
        for box in boxes(ranges, WORK if quantized else target.element_size()):
            index = tuple(i for _, i in box)
            expressions.place(made, index, self._part, target[inside(box)], self._copy)
        self._computed += target.nbytes if quantized else 0
        if self._computed > RELEASED:
            release_freed()
            self._computed = 0

    def _expression(self, source: Source) -> Expression:
        return source.made or expressions.Stored(source.key, self._tensors[source.key].shape)

    def mapped(self, source: Source, ranges: Sequence[Sequence[Range]]) -> Tensor | None:
        """Return a rank's part of `source` as a view of the mapped file; None if not possible.

        Args:
            source: where the tensor comes from; None is returned for an expression, and for a
                weight that is quantized.
            ranges: per dimension, the ascending ranges of indices that the rank holds.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if source.made is not None or source.key in self._quantized:
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

    def kept(
        self, source: Source, ranges: Sequence[Sequence[Range]], dtype: torch.dtype
    ) -> KeptWeight | None:
        """Return a rank's part of `source` as it is stored; None if nothing of it is quantized.

        Raises:
            CheckpointError: a file cannot be read.
        """
        made = self._expression(source)
        sources = [*expressions.stored(made)]
        if not any(key in self._quantized for key in sources):
            return None
        index = tuple(map(indices, ranges))
        shape = [len(i) for i in index]
        pieces: list[Piece] = []

        def read(key: str, at: Index) -> Tensor:
            weight = self._quantized.get(key)
            parts = {"": self._part(key, at)} if weight is None else self._parts(weight, at)
            held = {role: _together(tensor) for role, tensor in parts.items()}
            pieces.append(Piece.of(key, weight, at, held))
            return torch.empty([len(i) for i in at], device="meta")

        make = partial(expressions.part, made)
        if 0 in shape:  # of fewer experts than ranks, say
            make = _as_read
            pieces.append(Piece.of("", None, index, {"": torch.empty(shape, dtype=dtype)}))
        else:
            make(index, read)
        keys = (
            self._quantized[key].stored_keys() if key in self._quantized else [key]
            for key in sources
        )
        every = dict(map(self._full, chain.from_iterable(keys)))
        return KeptWeight(Held(make, index, pieces, every), shape, dtype)

    def _full(self, key: str) -> tuple[str, StoredTensor]:
        entry = self._stored[key]
        whole = partial(self._files[entry.file].read, entry.offset, entry.nbytes, entry.dtype)
        return key, StoredTensor(
            entry.nbytes, lambda: whole().view(entry.shape), self._quantization
        )

    def _parts(self, weight: QuantizedWeight, index: Index) -> dict[str, Tensor]:
        try:
            return layout.wanted(
                weight, index, lambda part, at: self._slice(part.key, part.shape, at)
            )
        except Mismatch as error:
            raise CheckpointError(f"{error}: fetch the checkpoint again") from None

    def _part(self, key: str, index: Index) -> Tensor:
        """Return the tensor `key` at `index`: stored, or computed from what is stored of it."""
        weight = self._quantized.get(key)
        if weight is None:
            return self._slice(key, self._stored[key].shape, index)
        return layout.computed(weight, index, self._parts(weight, index))

    def _slice(self, key: str, shape: Sequence[int], index: Index) -> Tensor:
        """Return a stored tensor at `index`, as a view of the file if it is one slice."""
        entry = self._stored[key]
        with _reading(entry.file):
            flat = self._files[entry.file].read(entry.offset, entry.nbytes, entry.dtype)
        out = flat.view(tuple(shape))
        apart = [d for d, i in enumerate(index) if not expressions.counts(i - i[0])]
        for d, i in enumerate(index):
            if d not in apart:
                out = out.narrow(d, int(i[0]), len(i))
        for d in apart:
            out = out.index_select(d, index[d])
        self.read += out.nbytes
        return out


def _as_read(index: Index, read: Callable[[str, Index], Tensor]) -> Tensor:
    return read("", index)


def _together(tensor: Tensor) -> Tensor:
    """Return the tensor; or a copy if it lies apart in the file, or not aligned to its elements."""
    if tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error}): fetch the file again") from None


CHUNK = 8 * 2**20
"""Most bytes per read, unless a single element is larger."""
WORK = 16
"""Bytes, about, that an element of a quantized weight takes while it is computed."""
RELEASED = 16 * 2**20
"""Bytes after whose computing freed memory is returned to the system."""
MANY = 32
"""If there are more ranges than this, small ones are read together."""
SMALL = 2**16
"""Ranges of fewer bytes than this are not worth a separate read."""

Box = tuple[tuple[int, Tensor], ...]
"""For each dimension, where it begins in the local tensor, and its indices in the full one."""


def inside(box: Box) -> tuple[slice, ...]:
    """Return where the box is in the local tensor."""
    return tuple(slice(to, to + len(index)) for to, index in box)


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
    for box in product(*(_spans(dim, whole // len(dim)) for dim in ranges)):
        yield from _bounded(box, itemsize, chunk)


def _spans(ranges: Sequence[Range], nbytes: int) -> list[tuple[int, Tensor]]:
    """Return what is read together of one dimension whose ranges have about `nbytes` each."""
    held = [torch.arange(a, b) for a, b in ranges]
    if len(ranges) > MANY and nbytes < SMALL:
        return [(0, torch.cat(held))]
    begins = accumulate((len(index) for index in held), initial=0)
    return list(zip(begins, held, strict=False))


def _bounded(box: Box, itemsize: int, chunk: int) -> Iterator[Box]:
    """Cut `box` along its outermost dimensions, so that each piece is contiguous in the file."""
    size = prod(len(index) for _, index in box) * itemsize
    dim = next((d for d, (_, index) in enumerate(box) if len(index) > 1), None)
    if size <= chunk or dim is None:
        yield box
        return
    to, index = box[dim]
    for piece in index.split(max(len(index) * chunk // size, 1)):
        yield from _bounded((*box[:dim], (to, piece), *box[dim + 1 :]), itemsize, chunk)
        to += len(piece)
