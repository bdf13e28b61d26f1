"""Which boxes of a whole tensor to read to fill one rank's part, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import torch

from shardwright.planner.contract.dims import Range

CHUNK = 8 * 2**20
"""Bytes that one read takes at most (unless a single element is larger)."""
MANY = 32
"""From more ranges than this on, small ones are read as one slice around them."""
SMALL = 2**16
"""Bytes below which a range is not worth a read of its own."""


@dataclass(frozen=True)
class Span:
    """Part of one dimension: whole[start:stop], held whole or as `picked`, from `to` on."""

    start: int
    stop: int
    to: int
    picked: torch.Tensor | None = None

    @property
    def held(self) -> int:
        """How many of the indices the rank holds."""
        return self.stop - self.start if self.picked is None else len(self.picked)

    def split(self, parts: int) -> Iterator[Span]:
        """Cut into `parts` spans that hold about equally much."""
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
    """Boxes that together cover the held `ranges` of each dimension once.

    Args:
        ranges: per dimension, the ascending ranges of indices that the rank holds.
        itemsize: bytes of one element.
        chunk: bytes that a box has at most, unless one element is larger.
    """
    held = [sum(b - a for a, b in dim) for dim in ranges]
    if 0 in held:
        return
    whole = prod(held) * itemsize
    spans = [_spans(dim, whole // len(dim)) for dim in ranges]
    for box in product(*spans):
        yield from _bounded(box, itemsize, chunk)


def _spans(ranges: Sequence[Range], nbytes: int) -> list[Span]:
    """The spans to read of one dimension whose ranges are worth about `nbytes` each."""
    if len(ranges) > MANY and nbytes < SMALL:
        return [_picking(torch.cat([torch.arange(a, b) for a, b in ranges]), 0)]
    out: list[Span] = []
    to = 0
    for a, b in ranges:
        out.append(Span(a, b, to))
        to += b - a
    return out


def box_bytes(box: Box, itemsize: int) -> int:
    """Bytes that reading `box` takes."""
    return prod(s.stop - s.start for s in box) * itemsize


def _bounded(box: Box, itemsize: int, chunk: int) -> Iterator[Box]:
    """Cut `box` along its outermost dimensions, whose parts lie together in the file."""
    size = box_bytes(box, itemsize)
    dim = next((d for d, span in enumerate(box) if span.held > 1), None)
    if size <= chunk or dim is None:
        yield box
        return
    for span in box[dim].split(min(ceil(size / chunk), box[dim].held)):
        yield from _bounded((*box[:dim], span, *box[dim + 1 :]), itemsize, chunk)
