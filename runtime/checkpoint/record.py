"""What torch code that only moves elements makes of stored tensors, told by running it on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.checkpoint.expressions import (
    Cut,
    Expression,
    Joined,
    Permuted,
    Reshaped,
    Stored,
)

aten: Any = torch.ops.aten

Rule = Callable[..., Expression | list[Expression]]
"""(the op's result, its arguments with expressions for tensors) -> what the result is."""


class Unexpressed(Exception):
    """An op that does more than move elements."""


def _same(out: Tensor, x: Expression, *_: Any, **__: Any) -> Expression:
    return x


def _reshaped(out: Tensor, x: Expression, *_: Any, **__: Any) -> Expression:
    return Reshaped(x, tuple(out.shape))


def _transposed(out: Tensor, x: Expression, a: int = -2, b: int = -1) -> Expression:
    dims = list(range(len(x.shape)))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return Permuted(x, tuple(dims))


def _t(out: Tensor, x: Expression) -> Expression:
    return x if len(x.shape) < 2 else _transposed(out, x)


def _permuted(out: Tensor, x: Expression, dims: Sequence[int]) -> Expression:
    return Permuted(x, tuple(d % len(x.shape) for d in dims))


def _sliced(
    out: Tensor,
    x: Expression,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Expression:
    dim %= len(x.shape)
    return Cut(x, dim, range(x.shape[dim])[start:end:step])


def _selected(out: Tensor, x: Expression, dim: int, index: int) -> Expression:
    dim %= len(x.shape)
    index %= x.shape[dim]
    return Reshaped(Cut(x, dim, range(index, index + 1)), tuple(out.shape))


def _split(outs: Sequence[Tensor], x: Expression, size: Any, dim: int = 0) -> list[Expression]:
    dim %= len(x.shape)
    pieces: list[Expression] = []
    start = 0
    for out in outs:
        pieces.append(Cut(x, dim, range(start, start + out.shape[dim])))
        start += out.shape[dim]
    return pieces


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
    aten.t.default: _t,
    aten._to_copy.default: _same,
    aten.transpose.int: _transposed,
    aten.unbind.int: _unbound,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
}
"""All that conversions do to tensors; what is not here is refused."""


class Recorder(TorchDispatchMode):
    """While it is entered, ops on tensors from `stored` are recorded.

    Raises:
        Unexpressed: an op has no rule, or would cast.
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept too, so that no other comes to have the id of one.
        self.known: dict[int, tuple[Tensor, Expression]] = {}

    def stored(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on meta that stands for the stored one."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.known[id(tensor)] = tensor, Stored(key, shape)
        return tensor

    def expression(self, tensor: Tensor) -> Expression:
        """What `tensor`, which came of recorded ops, is made of."""
        if id(tensor) not in self.known:
            raise Unexpressed("a tensor comes from somewhere else")
        return self.known[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on meta and write down what its results are."""
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
