"""Expressions for tensors that are stored tensors with their elements moved, and reading of parts.

A `Recorder` runs torch code on meta tensors and records what the code makes of stored tensors. The
full result is never computed: `part` takes the wanted indices of each dimension and translates
them, node by node, to indices of the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]
Index = tuple[Tensor, ...]
"""Wanted indices for each dimension, in any order: their product selects a part of a tensor."""
Read = Callable[[str, Index], Tensor]
"""(key, indices) -> that part of the stored tensor."""
Copy = Callable[[Tensor, Tensor], object]
"""Copies the second tensor into the first."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the checkpoint."""

    key: str
    shape: Shape


@dataclass(frozen=True, eq=False)
class Permuted:
    """Dimension `i` is dimension `dims[i]` of `whole`."""

    whole: Expression
    dims: Shape

    @property
    def shape(self) -> Shape:
        """Return the shape."""
        return tuple(self.whole.shape[d] for d in self.dims)


@dataclass(frozen=True, eq=False)
class Reshaped:
    """The same elements in the same row-major order, in another shape."""

    whole: Expression
    shape: Shape


@dataclass(frozen=True, eq=False)
class Joined:
    """Tensors concatenated along `dim`."""

    parts: tuple[Expression, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        """Return the shape."""
        sizes = list(self.parts[0].shape)
        sizes[self.dim] = sum(p.shape[self.dim] for p in self.parts)
        return tuple(sizes)


@dataclass(frozen=True, eq=False)
class Cut:
    """The indices `kept` along dimension `dim`."""

    whole: Expression
    dim: int
    kept: range

    @property
    def shape(self) -> Shape:
        """Return the shape."""
        sizes = list(self.whole.shape)
        sizes[self.dim] = len(self.kept)
        return tuple(sizes)


Expression = Stored | Permuted | Reshaped | Joined | Cut


def stored(expression: Expression) -> Iterator[str]:
    """Yield the keys of the stored tensors in `expression`, as often as they occur."""
    if isinstance(expression, Stored):
        yield expression.key
        return
    for inner in expression.parts if isinstance(expression, Joined) else (expression.whole,):
        yield from stored(inner)


def part(expression: Expression, index: Index, read: Read) -> Tensor:
    """Return the elements of `expression` at `index`; dimension d has `len(index[d])` elements.

    `index` has at least one index for each dimension. `read` gets only indices of elements that are
    in the result, unless a reshaped dimension is cut at places that are no product of indices.
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
    """Write `part(expression, index, read)` to `out`, joined tensors directly to their places."""
    if isinstance(expression, Permuted):
        whole = out.permute([expression.dims.index(d) for d in range(len(index))])
        at = tuple(index[expression.dims.index(d)] for d in range(len(index)))
        return place(expression.whole, at, read, whole, copy)
    if not isinstance(expression, Joined):
        copy(out, part(expression, index, read))
        return None
    for inner, at, places in _pieces(expression, index):
        if counts(places - places[0]):
            to = out.narrow(expression.dim, int(places[0]), len(places))
            place(inner, at, read, to, copy)
        else:
            piece = part(inner, at, read).to(out.device, out.dtype)
            out.index_copy_(expression.dim, places.to(out.device), piece)
    return None


def _pieces(expression: Joined, index: Index) -> Iterator[tuple[Expression, Index, Tensor]]:
    """Yield each joined tensor that is needed, its wanted indices, and their places along `dim`."""
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
    return joined if counts(order) else joined.index_select(d, order.argsort())


def _reshape(expression: Reshaped, index: Index, read: Read) -> Tensor:
    """Read, for each group of dimensions, the least product of indices with all wanted ones."""
    wanted: list[Tensor] = []  # per group, places in the product
    inner: list[Tensor] = []  # per dimension of the original shape
    sizes: list[int] = []  # per group, size of the product
    for new, old in _groups(expression.shape, expression.whole.shape):
        flat = torch.zeros(1, dtype=torch.int64)
        for d in new:
            flat = (flat[:, None] * expression.shape[d] + index[d]).flatten()
        at = torch.zeros_like(flat)
        for i in torch.unravel_index(flat, [expression.whole.shape[d] for d in old]) if old else ():
            values, places = i.unique(return_inverse=True)
            inner.append(values)
            at = at * len(values) + places
        wanted.append(at)
        sizes.append(prod(map(len, inner[len(inner) - len(old) :])))
    out = part(expression.whole, tuple(inner), read).reshape(sizes)
    for d, at in enumerate(wanted):
        if len(at) != sizes[d] or not counts(at):
            out = out.index_select(d, at)
    return out.reshape([len(i) for i in index])


def _groups(new: Shape, old: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dimensions of two shapes that hold equally many elements."""
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


def counts(index: Tensor) -> bool:
    """Return whether `index` is 0, 1, 2, ..."""
    return bool((index == torch.arange(len(index))).all())


aten: Any = torch.ops.aten

Rule = Callable[..., Expression | list[Expression]]
"""(the op's result, its arguments with expressions for tensors) -> the result's expression."""


class Unexpressed(Exception):
    """An op does more than move elements."""


def _same(out: Tensor, x: Expression, *_: Any, **__: Any) -> Expression:
    return x


def _reshaped(out: Tensor, x: Expression, *_: Any, **__: Any) -> Expression:
    return Reshaped(x, tuple(out.shape))


def _transposed(out: Tensor, x: Expression, a: int = -2, b: int = -1) -> Expression:
    dims = list(range(len(x.shape)))
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return Permuted(x, tuple(dims))


def _permuted(out: Tensor, x: Expression, dims: Sequence[int]) -> Expression:
    return Permuted(x, tuple(d % len(x.shape) for d in dims))


def _sliced(out: Tensor, x: Expression, dim: int = 0, *bounds: int | None) -> Expression:
    dim %= len(x.shape)
    return Cut(x, dim, range(x.shape[dim])[slice(*bounds) if bounds else slice(None)])


def _selected(out: Tensor, x: Expression, dim: int, index: int) -> Expression:
    dim %= len(x.shape)
    index %= x.shape[dim]
    return Reshaped(Cut(x, dim, range(index, index + 1)), tuple(out.shape))


def _split(outs: Sequence[Tensor], x: Expression, size: Any, dim: int = 0) -> list[Expression]:
    dim %= len(x.shape)
    sizes = [out.shape[dim] for out in outs]
    return [Cut(x, dim, range(e - n, e)) for n, e in zip(sizes, accumulate(sizes), strict=True)]


def _unbound(outs: Sequence[Tensor], x: Expression, dim: int = 0) -> list[Expression]:
    return [_selected(out, x, dim, i) for i, out in enumerate(outs)]  # type: ignore[misc]


def _cat(out: Tensor, parts: Sequence[Expression], dim: int = 0) -> Expression:
    return Joined(tuple(p for p in parts if p.shape != (0,)), dim % out.dim())


def _stack(out: Tensor, parts: Sequence[Expression], dim: int = 0) -> Expression:
    dim %= out.dim()
    shape = (*out.shape[:dim], 1, *out.shape[dim + 1 :])
    return Joined(tuple(Reshaped(p, shape) for p in parts), dim)


RULES: Mapping[Any, Rule] = {
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permuted,
    aten._reshape_alias.default: _reshaped,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.stack.default: _stack,
    aten.t.default: _transposed,
    aten._to_copy.default: _same,
    aten.transpose.int: _transposed,
    aten.unbind.int: _unbound,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
}
"""The ops that conversions may use; any other op raises `Unexpressed`."""


class Recorder(TorchDispatchMode):
    """A mode that records ops on the tensors that `stored` returns.

    Raises:
        Unexpressed: an op has no rule, or mixes dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept alive so that no new tensor gets the id of one of them.
        self.known: dict[int, tuple[Tensor, Expression]] = {}

    def stored(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a meta tensor that stands for a stored tensor."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.known[id(tensor)] = tensor, Stored(key, shape)
        return tensor

    def expression(self, tensor: Tensor) -> Expression:
        """Return the expression of `tensor`, a result of recorded ops."""
        if id(tensor) not in self.known:
            raise Unexpressed("a tensor comes from somewhere else")
        return self.known[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on meta tensors and record the expressions of its results."""
        kwargs = kwargs or {}
        inputs = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        tensors = [a for a in inputs if isinstance(a, Tensor)]
        if not any(id(t) in self.known for t in tensors):
            return func(*args, **kwargs)
        if func not in RULES:
            raise Unexpressed(f"it calls {func}")
        result = func(*args, **kwargs)
        outs = list(result) if isinstance(result, (list, tuple)) else [result]
        if {t.dtype for t in (*tensors, *outs)} != {tensors[0].dtype}:
            raise Unexpressed("it mixes dtypes")
        made = RULES[func](result, *self._expressions(args), **kwargs)
        for out, expression in zip(outs, made if isinstance(made, list) else [made], strict=True):
            assert tuple(out.shape) == expression.shape
            self.known[id(out)] = out, expression
        return result

    def _expressions(self, args: Any) -> list[Any]:
        if isinstance(args, Tensor):
            return self.expression(args)  # type: ignore[return-value]
        if isinstance(args, (list, tuple)):
            return [self._expressions(a) for a in args]
        return args
