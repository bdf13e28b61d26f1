"""Tensors made from stored ones by moving elements about, and which stored ones a part needs.

Nothing is computed for a whole tensor: `part` takes the indices that are wanted of each dimension
and carries them back, node by node, to indices of the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]
Index = tuple[Tensor, ...]
"""Per dimension the indices that are wanted, in any order: their product is a part of a tensor."""
Read = Callable[[str, Index], Tensor]
"""(key, indices) -> that part of the stored tensor."""
Copy = Callable[[Tensor, Tensor], object]
"""Has the first become the second."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as the checkpoint holds it."""

    key: str
    shape: Shape


@dataclass(frozen=True, eq=False)
class Permuted:
    """Dimension `i` is dimension `dims[i]` of `whole`."""

    whole: Expression
    dims: Shape

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return tuple(self.whole.shape[d] for d in self.dims)


@dataclass(frozen=True, eq=False)
class Reshaped:
    """The same elements in the same (row-major) order."""

    whole: Expression
    shape: Shape


@dataclass(frozen=True, eq=False)
class Joined:
    """Tensors one after the other along `dim`."""

    parts: tuple[Expression, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        """Its shape."""
        sizes = list(self.parts[0].shape)
        sizes[self.dim] = sum(p.shape[self.dim] for p in self.parts)
        return tuple(sizes)


@dataclass(frozen=True, eq=False)
class Cut:
    """The indices `kept` of dimension `dim`."""

    whole: Expression
    dim: int
    kept: range

    @property
    def shape(self) -> Shape:
        """Its shape."""
        sizes = list(self.whole.shape)
        sizes[self.dim] = len(self.kept)
        return tuple(sizes)


Expression = Stored | Permuted | Reshaped | Joined | Cut


def stored(expression: Expression) -> Iterator[str]:
    """The keys of the stored tensors that `expression` is made from, each as often as it occurs."""
    if isinstance(expression, Stored):
        yield expression.key
        return
    for inner in expression.parts if isinstance(expression, Joined) else (expression.whole,):
        yield from stored(inner)


def part(expression: Expression, index: Index, read: Read) -> Tensor:
    """What `expression` holds at `index`: a tensor of as many elements a dimension as it names.

    `index` names at least one of each dimension. `read` is asked for no element of a stored tensor
    that is not in the result.
    """
    if isinstance(expression, Stored):
        return read(expression.key, index)
    if isinstance(expression, Permuted):
        inner = list(index)
        for i, d in enumerate(expression.dims):
            inner[d] = index[i]
        return part(expression.whole, tuple(inner), read).permute(expression.dims)
    if isinstance(expression, Cut):
        kept, d = expression.kept, expression.dim
        moved = index[d] * kept.step + kept.start
        return part(expression.whole, (*index[:d], moved, *index[d + 1 :]), read)
    if isinstance(expression, Joined):
        return _join(expression, index, read)
    return _reshape(expression, index, read)


def place(
    expression: Expression, index: Index, read: Read, out: Tensor, copy: Copy = Tensor.copy_
) -> None:
    """Write `part(expression, index, read)` to `out`; what is joined goes straight to its place."""
    if isinstance(expression, Permuted):
        whole = out.permute([expression.dims.index(d) for d in range(len(index))])
        at = tuple(index[expression.dims.index(d)] for d in range(len(index)))
        return place(expression.whole, at, read, whole, copy)
    if not isinstance(expression, Joined):
        copy(out, part(expression, index, read))
        return None
    for inner, at, places in _pieces(expression, index):
        if _counts(places - places[0]):
            to = out.narrow(expression.dim, int(places[0]), len(places))
            place(inner, at, read, to, copy)
        else:
            piece = part(inner, at, read).to(out.device, out.dtype)
            out.index_copy_(expression.dim, places.to(out.device), piece)
    return None


def _pieces(expression: Joined, index: Index) -> Iterator[tuple[Expression, Index, Tensor]]:
    """What is joined, the indices that are wanted of it, and where along `dim` these are."""
    d = expression.dim
    ends = accumulate(p.shape[d] for p in expression.parts)
    for inner, end in zip(expression.parts, ends, strict=True):
        start = end - inner.shape[d]
        (places,) = torch.where((index[d] >= start) & (index[d] < end))
        if len(places):
            yield inner, (*index[:d], index[d][places] - start, *index[d + 1 :]), places


def _join(expression: Joined, index: Index, read: Read) -> Tensor:
    d, found = expression.dim, list(_pieces(expression, index))
    pieces = [part(inner, at, read) for inner, at, _ in found]
    if len(pieces) == 1:
        return pieces[0]
    joined, order = torch.cat(pieces, d), torch.cat([places for *_, places in found])
    return joined if _counts(order) else joined.index_select(d, order.argsort())


def _reshape(expression: Reshaped, index: Index, read: Read) -> Tensor:
    """Group by group of dimensions that became others; each group's indices fall into products."""
    shape = [len(i) for i in index]
    inner: list[list[tuple[slice, Index]]] = []
    flat: list[int] = []
    for new, old in _groups(expression.shape, expression.whole.shape):
        at = torch.zeros(1, dtype=torch.int64)
        for d in new:
            at = (at[:, None] * expression.shape[d] + index[d]).flatten()
        inner.append(list(_products(at, [expression.whole.shape[d] for d in old])))
        flat.append(len(at))
    if all(len(pieces) == 1 for pieces in inner):
        at = tuple(i for pieces in inner for i in pieces[0][1])
        return part(expression.whole, at, read).reshape(shape)
    out: Tensor | None = None
    for pieces in product(*inner):
        piece = part(expression.whole, tuple(i for _, at in pieces for i in at), read)
        if out is None:
            out = piece.new_empty(flat)
        to = out[tuple(place for place, _ in pieces)]
        to.copy_(piece.reshape(to.shape))
    assert out is not None
    return out.reshape(shape)


def _groups(new: Shape, old: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The least runs of dimensions of two shapes that hold equally many elements."""
    i = j = 0
    while i < len(new) or j < len(old):
        a, b = [i][: len(new) - i], [j][: len(old) - j]
        while (m := prod(new[d] for d in a)) != (n := prod(old[d] for d in b)):
            if m < n:
                a.append(i + len(a))
            else:
                b.append(j + len(b))
        yield a, b
        i, j = i + len(a), j + len(b)


def _products(flat: Tensor, shape: list[int]) -> Iterator[tuple[slice, Index]]:
    """Cut row-major indices of `shape` into runs, each a product of indices of its dimensions."""
    if len(shape) < 2:
        yield slice(0, len(flat)), (flat,) * len(shape)
        return
    rest = prod(shape[1:])
    major, minor = flat // rest, flat % rest
    cuts = (torch.where(torch.diff(major) != 0)[0] + 1).tolist()
    alike: list[tuple[int, int]] = []  # runs of one major index each, with the same minor ones
    for a, b in pairwise([0, *cuts, len(flat)]):
        if alike and not torch.equal(minor[a:b], minor[slice(*alike[0])]):
            yield from _repeated(alike, major, minor, shape[1:])
            alike = []
        alike.append((a, b))
    yield from _repeated(alike, major, minor, shape[1:])


def _repeated(
    runs: list[tuple[int, int]], major: Tensor, minor: Tensor, shape: list[int]
) -> Iterator[tuple[slice, Index]]:
    inner = list(_products(minor[slice(*runs[0])], shape))
    if len(inner) == 1:
        yield slice(runs[0][0], runs[-1][1]), (major[[a for a, _ in runs]], *inner[0][1])
        return
    for a, _ in runs:
        for place, at in inner:
            yield slice(a + place.start, a + place.stop), (major[a : a + 1], *at)


def _counts(index: Tensor) -> bool:
    """Whether `index` is 0, 1, 2, ..."""
    return bool((index == torch.arange(len(index))).all())
