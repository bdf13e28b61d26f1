"""Custom autograd functions of models. Their backward is not in the trace, so it is tested.

The test uses random numbers. It finds whether the backward is linear in the gradient, so that a
partial gradient is enough, and whether its result on a shard is the shard of its full result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.runtime.scopes import replaced

Function: Any = torch.autograd.Function
LONGEST = 4
"""The largest dim of tensors in the test on shards."""


class OwnGradients:
    """Inputs and outputs of custom autograd functions.

    Attributes:
        whole: Tensors of which every rank needs the full gradient.
        unsplit: Tensors whose gradient may be partial but not sharded.
    """

    def __init__(self) -> None:
        self.whole: list[Tensor] = []
        self.unsplit: list[Tensor] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that notes inputs and outputs of model functions in this thread."""
        before, thread = vars(Function)["apply"], get_ident()

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            found = before.__func__(cls, *args, **kwargs)
            if get_ident() == thread and not is_plumbing(cls.__module__):
                ends = [t for t in tree_leaves((args, found)) if _is_real(t)]
                linear, parts = _tried(before.__get__(None, cls), args, ends)
                if not linear:
                    self.whole += ends
                elif not parts:
                    self.unsplit += ends
            return found

        with replaced(Function, apply=classmethod(apply)):
            yield


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tried(
    function: Callable[..., Any], args: Sequence[Any], ends: Sequence[Tensor]
) -> tuple[bool, bool]:
    """Return whether a backward is linear, and whether it does the same on shards."""
    alike = len({tuple(t.shape) for t in ends}) == 1
    shape = tuple(min(n, LONGEST) for n in ends[0].shape) if alike and ends else None
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)

        def drawn(like: Any) -> Any:
            if not isinstance(like, Tensor):
                return like
            if not like.is_floating_point():
                raise NotImplementedError  # indices: the valid range is unknown
            sizes = shape or tuple(like.shape)
            return torch.randn(sizes, dtype=torch.float64, generator=generator)

        try:
            given = [drawn(a) for a in args]
            out = function(*given)
            grads = [[drawn(t) for t in tree_leaves(out) if _is_real(t)] for _ in range(2)]
            sums = [a + b for a, b in zip(*grads, strict=True)]
            one, two, both = (_backward(function, given, g) for g in (*grads, sums))
            linear = all(map(_close, (a + b for a, b in zip(one, two, strict=True)), both))
            parts = bool(shape) and all(
                _same_on_parts(function, given, sums, both, dim) for dim in range(len(shape or ()))
            )
        except Exception:  # any exception of its code on such numbers
            return False, False
    return linear, parts


def _same_on_parts(
    function: Callable[..., Any],
    given: Sequence[Any],
    grads: Sequence[Tensor],
    whole: Sequence[Tensor],
    dim: int,
) -> bool:
    """Return whether the gradient of each half along a dim is that half of `whole`."""
    half = whole[0].shape[dim] // 2
    for at in (slice(0, half), slice(half, None)) if half else ():
        place = (*[slice(None)] * dim, at)

        def part(t: Any, place: tuple[slice, ...] = place) -> Any:
            return t[place] if isinstance(t, Tensor) else t

        found = _backward(function, tree_map(part, given), [part(g) for g in grads])
        if not all(map(_close, found, map(part, whole))):
            return False
    return True


def _backward(
    function: Callable[..., Any], given: Sequence[Any], grads: Sequence[Tensor]
) -> list[Tensor]:
    leaves = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in given]
    out = [t for t in tree_leaves(function(*leaves)) if _is_real(t)]
    inputs = [t for t in leaves if isinstance(t, Tensor)]
    found = torch.autograd.grad(out, inputs, list(grads), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)
