"""Splits one tensor dimension over one mesh dim, as index sets, and the operations on the parts.

A dimension is seen as (major, inner, minor), where `inner` is the atom or the sum that the mesh
dim splits. A fused q|k|v is several index ranges of one dimension, `heads@tp * head_dim` is a
single one, and `?*4@tp` splits the middle of a product whose outer size is known only at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.errors import PlanError
from shardwright.planner.contract import dims
from shardwright.planner.contract.dims import Atom, Dim, Product, Range
from shardwright.runtime.communication.collectives import all_gather, all_reduce, reduce_scatter
from shardwright.runtime.communication.mesh import Group

Ranges = tuple[Range, ...]


@dataclass(eq=False)
class Split:
    """The parts of dimension `dim` of a tensor that the ranks of `group` hold.

    `inner` is split over `mesh` only. `major` and `minor` are sizes on this rank, None if known
    only at run time. Everything that does not depend on run-time sizes is computed once, here, and
    not in properties: torch.compile would trace into those.

    Attributes:
        static: whether the size of `inner` is known before run time; if not, the rest is empty.
        parts: the index ranges of `inner` that each rank holds.
        order: pieces (rank, start in its part, length) that make up the full dimension, in order.
        shared: where this rank's part has the indices that all ranks hold.
        sizes: how many indices of `inner` each rank holds.
        in_turn: whether the full dimension is the ranks' parts in rank order, all of one size. The
            input or result of a collective is then a view of it if no dim before is longer than 1,
            and otherwise a copy.
        size, own: the size of `inner`, in full and on this rank; None if not static.
        shift: how many dims `inner` is behind `dim` once `dim` is unflattened.
    """

    group: Group
    mesh: str
    dim: int
    inner: Dim
    major: int | None = 1
    minor: int | None = 1
    static: bool = field(init=False)
    parts: tuple[Ranges, ...] = field(init=False, default=())
    order: tuple[tuple[int, int, int], ...] = field(init=False, default=())
    shared: Ranges = field(init=False, default=())
    sizes: tuple[int, ...] = field(init=False, default=())
    in_turn: bool = field(init=False, default=False)
    size: int | None = field(init=False)
    own: int | None = field(init=False, default=None)
    shift: int = field(init=False)

    def __post_init__(self) -> None:
        self.size, self.shift = dims.dim_size(self.inner), int(not self.major == self.minor == 1)
        self.static = self.size is not None
        if not self.static:
            return
        ranks = self.group.size
        self.parts = tuple(
            tuple(dims.local_ranges(self.inner, {self.mesh: (rank, ranks)}))
            for rank in range(ranks)
        )
        everywhere = tuple(dims.uncovered_ranges(self.inner, self.mesh))
        self.order = _order(self.parts, everywhere)
        self.shared = tuple(
            (offset, offset + length)
            for start, offset, length in _offsets(_cut(self.parts[self.group.rank], everywhere))
            if any(a <= start < b for a, b in everywhere)
        )
        self.sizes = tuple(map(_length, self.parts))
        self.own = self.sizes[self.group.rank]
        self.in_turn = _one_size(self.sizes) and all(
            piece == (rank, 0, self.own) for rank, piece in enumerate(self.order)
        )

    @classmethod
    def of(cls, group: Group, mesh: str, dim: int, layout: Dim) -> Split:
        """Make the split of dimension `dim`, laid out as `layout` (see `contract.dims.only`)."""
        plain = cls(group, mesh, dim, layout)
        if plain.static and all(len(ranges) <= 1 for ranges in plain.parts):
            return plain
        major, inner, minor = _inner(layout, mesh)
        if dims.dim_size(inner) is None and not isinstance(inner, Atom):
            raise PlanError(f"cannot split '{layout}' over {mesh}: a run-time size inside a sum")
        if [major, dims.dim_size(inner), minor].count(None) > 1:
            raise PlanError(f"cannot split '{layout}' over {mesh}: two run-time sizes in one dim")
        return cls(group, mesh, dim, inner, major, minor)

    def layout(self, size: int | None) -> tuple[Ranges, ...]:
        """Return `parts`; if not static, computed from `size`, the full size of `inner`."""
        if self.static:
            return self.parts
        assert size is not None
        return tuple((dims.shard_range(size, r, self.group.size),) for r in range(self.group.size))

    def size_in(self, x: Tensor) -> int:
        """Return the size of `inner`, if that is known only at run time, in a tensor or part."""
        return self._open(x, None).shape[self.dim + self.shift]

    # The following methods take and return tensors with their original dims.

    def take(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return this rank's part of a full `x`."""
        x, d = self._open(x, self.size), self.dim + self.shift
        parts = self.layout(x.shape[d])
        ranges = parts[self.group.rank]
        part = select(x, d, ranges)
        one = len(ranges) == 1
        return self._close(part.clone(memory_format=_CONTIGUOUS) if one else part.contiguous())

    def pad(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return a full tensor that is `x` in this rank's part and 0 elsewhere."""
        x, d = self._open(x, self.own), self.dim + self.shift
        size = self._whole(size)
        pieces, end = [], 0
        for start, offset, length in _offsets(self.layout(size)[self.group.rank]):
            pieces += [_zeros(x, d, start - end), x.narrow(d, offset, length)]
            end = start + length
        pieces.append(_zeros(x, d, size - end))
        return self._close(torch.cat(pieces, d))

    def all_gather(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return the full tensor, from each rank's part `x`; one all-gather."""
        x, d = self._open(x, self.own), self.dim + self.shift
        sizes, in_turn = (self.sizes, self.in_turn) if self.static else self._given(size)
        if in_turn:
            return self._close(all_gather(x, self.group, d))
        out = all_gather(_grow(x, d, max(sizes)), self.group)
        order = self.order if self.static else [(rank, 0, n) for rank, n in enumerate(sizes)]
        return self._close(torch.cat([out[rank].narrow(d, at, n) for rank, at, n in order], d))

    def reduce_scatter(self, x: Tensor, size: int | None = None) -> Tensor:
        """Return this rank's part of the sum of all ranks' full `x`; one reduce-scatter."""
        x, d = self._open(x, self.size), self.dim + self.shift
        sizes, in_turn = (self.sizes, self.in_turn) if self.static else self._given(x.shape[d])
        if in_turn:
            rows = x.unflatten(d, (len(sizes), sizes[0])).movedim(d, 0).contiguous()
            return self._close(reduce_scatter(rows, self.group))
        parts = self.layout(x.shape[d])
        stacked = torch.stack([_grow(select(x, d, ranges), d, max(sizes)) for ranges in parts])
        out = reduce_scatter(stacked, self.group).narrow(d, 0, sizes[self.group.rank])
        return self._close(out.contiguous())

    def reduce_shared(self, x: Tensor, size: int | None = None) -> Tensor:
        """Sum the indices that all ranks hold over the ranks, in this rank's part; one all-reduce.

        Indices that only some ranks hold are left as they are.
        """
        return self._with_shared(x, lambda shared: all_reduce(shared, self.group))

    def keep_first_shared(self, x: Tensor, size: int | None = None) -> Tensor:
        """Zero the indices that all ranks hold in this rank's part, except on the first rank."""
        return x if self.group.rank == 0 else self._with_shared(x, torch.zeros_like)

    def _with_shared(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part `x` with `change` applied to what all ranks hold."""
        x, d = self._open(x, self.own), self.dim + self.shift
        changed = change(select(x, d, self.shared))
        pieces, end = [], 0
        for (a, b), (_, offset, length) in zip(self.shared, _offsets(self.shared), strict=True):
            pieces += [x.narrow(d, end, a - end), changed.narrow(d, offset, length)]
            end = b
        pieces.append(x.narrow(d, end, x.shape[d] - end))
        return self._close(torch.cat(pieces, d))

    # Sizes and views.

    def _given(self, size: int | None) -> tuple[tuple[int, ...], bool]:
        """Return `sizes` and `in_turn` for a full size that is known only at run time."""
        sizes = tuple(map(_length, self.layout(self._whole(size))))
        return sizes, _one_size(sizes)

    def _whole(self, size: int | None) -> int:
        if self.size is not None:
            return self.size
        assert size is not None, "a part does not show the whole size"
        return size

    def _open(self, x: Tensor, inner: int | None) -> Tensor:
        """Return `x` with dimension `dim` as (major, inner, minor)."""
        expected = None if self.shift else inner
        if expected is not None and x.shape[self.dim] != expected:
            raise PlanError(
                f"dimension {self.dim} of a tensor of shape {tuple(x.shape)}, laid out as "
                f"'{self.inner}', should have {expected} elements on rank {self.group.rank}"
            )
        if not self.shift:
            return x
        sizes = [-1 if n is None else n for n in (self.major, inner, self.minor)]
        return x.unflatten(self.dim, sizes)

    def _close(self, x: Tensor) -> Tensor:
        return x.flatten(self.dim, self.dim + 2) if self.shift else x


_CONTIGUOUS = torch.contiguous_format


ACTIONS: Mapping[str, Callable[[Split, Tensor, int | None], Tensor]] = {
    "take": Split.take,
    "pad": Split.pad,
    "all_gather": Split.all_gather,
    "reduce_scatter": Split.reduce_scatter,
    "reduce_shared": Split.reduce_shared,
    "keep_first_shared": Split.keep_first_shared,
}
"""Names of the actions on a sharded dim (`planner/contract/transitions.py`) -> what does them."""


def _inner(dim: Dim, mesh: str) -> tuple[int | None, Dim, int | None]:
    """Return `dim` as (size of the major factors, what `mesh` splits, size of the minor ones)."""
    if not isinstance(dim, Product):
        return 1, dim, 1
    places = [i for i, f in enumerate(dim.factors) if any(a.mesh == mesh for a in dims.atoms(f))]
    if len(places) != 1:
        raise PlanError(f"'{dim}' is split twice over {mesh}")
    at = places[0]
    major, inner, minor = _inner(dim.factors[at], mesh)
    before, after = Product(dim.factors[:at]), Product(dim.factors[at + 1 :])
    return _times(dims.dim_size(before), major), inner, _times(minor, dims.dim_size(after))


def _times(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def _length(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


def _one_size(sizes: tuple[int, ...]) -> bool:
    return min(sizes) == max(sizes)


def _offsets(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Return (start in the full dim, start in the part, length) of each range of a part."""
    out, offset = [], 0
    for a, b in ranges:
        out.append((a, offset, b - a))
        offset += b - a
    return out


def _order(parts: tuple[Ranges, ...], everywhere: Ranges) -> tuple[tuple[int, int, int], ...]:
    """Return the pieces (rank, start in its part, length) in order; shared ones from rank 0."""
    pieces = sorted(
        (start, rank, offset, length)
        for rank, ranges in enumerate(parts)
        for start, offset, length in _offsets(_cut(ranges, everywhere))
    )
    first: dict[int, tuple[int, int, int]] = {}
    for start, rank, offset, length in pieces:
        first.setdefault(start, (rank, offset, length))
    return tuple(first.values())


def _cut(ranges: Ranges, boundaries: Ranges) -> Ranges:
    """Cut `ranges` where one of `boundaries` begins or ends."""
    points = sorted({p for boundary in boundaries for p in boundary})
    out: list[Range] = []
    for a, b in ranges:
        stops = [a, *(p for p in points if a < p < b), b]
        out += zip(stops, stops[1:], strict=False)
    return tuple(out)


def indices(ranges: Iterable[Range]) -> Tensor:
    """Return the indices in `ranges`."""
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in ranges)])


def select(x: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Return `x` at some ranges of indices of a dim: a view for one range, or new memory."""
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    return torch.cat([x.narrow(dim, a, b - a) for a, b in ranges] or [x.narrow(dim, 0, 0)], dim)


def _zeros(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_zeros([*x.shape[:dim], length, *x.shape[dim + 1 :]])


def _grow(x: Tensor, dim: int, length: int) -> Tensor:
    """Append zeros to `x` along `dim` up to `length`: collectives need equal shapes."""
    missing = length - x.shape[dim]
    return x if missing == 0 else pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
