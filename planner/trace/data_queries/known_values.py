"""Values of tensors that model code makes of plain numbers alone: positions, masks, offsets.

There is no data while a model is traced, but these are the same whatever the data. They are
computed beside the shapes, so that an op whose result is as long as its values say (`nonzero`) has
one. As with sizes, they are those of the inputs that are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.planner.trace.record.arguments import mapped, tensors_in

MOST = 1 << 16
"""Elements from which on values are not kept: nobody looks for a few in there."""

CPU = torch.device("cpu")

aten = torch.ops.aten
LIFTED = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""They are given the tensor that `torch.tensor` and its like have just filled."""

DRAWS = torch.Tag.nondeterministic_seeded
UNIFORM = {aten.rand.default, aten.rand.generator}
BELOW_ALL = {aten.lt.Scalar: False, aten.ge.Scalar: True}
"""Comparisons with a number, and what they give where that is none of those from 0 to 1."""


class KnownValues:
    """The values of fake tensors, as far as they are known; a tensor made in `fakes` is fake."""

    def __init__(self, fakes: AbstractContextManager[Any] | None = None) -> None:
        self._values = WeakIdKeyDictionary()
        self._ids = set[int]()
        """Of all that ever had a value: what is not among them has none, which most ops ask."""
        self._uniform = WeakIdKeyDictionary()
        """What holds random numbers from 0 to 1, 1 not among them."""
        self._fakes = fakes or nullcontext()

    def result(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """What an op gives, and whether only values say so; else `fake` does."""
        given = func in LIFTED or all(t in self for t in tensors_in((args, kwargs)))
        known = given and DRAWS not in func.tags and "empty" not in func.__name__
        try:
            out = fake()
        except (DynamicOutputShapeException, DataDependentOutputException):
            made = self._computed(func, args, kwargs) if known else None
            if made is not None:
                device = next(t.device for t in tensors_in((args, kwargs)))
                with self._fakes:
                    out = tree_map(lambda v: _like(v, device), made)
                self._keep(out, made)
                return out, True
            if func is aten.bincount.default and (bins := _bins(*args, **kwargs)) is not None:
                with self._fakes:
                    return bins(), False
            raise
        if func in UNIFORM or (func is aten.detach.default and args[0] in self._uniform):
            self._uniform[out] = True
        if func in BELOW_ALL and args[0] in self._uniform and args[1] <= 0:  # dropped never
            with on_data():
                made = torch.full(tuple(out.shape), BELOW_ALL[func])
        else:
            small = known and sum(t.numel() for t in tensors_in(out)) < MOST
            made = self._computed(func, args, kwargs) if small else None
        if made is None:
            self._forget(func, args)
        else:
            self._keep(out, made)
        return out, False

    def keep(self, tensor: Tensor, value: Tensor) -> None:
        """Take it that `tensor` has this value."""
        self._values[tensor] = value
        self._ids.add(id(tensor))

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of `tensor`; None if it is not known."""
        return self._values.get(tensor)

    def same(self, made: Tensor, given: Tensor) -> None:
        """`made` has the values of `given`."""
        if given in self:
            self.keep(made, self._values[given])

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids and tensor in self._values

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result on values; None if the CPU cannot compute it."""

        def real(value: Any) -> Any:
            return self._values.get(value, value) if isinstance(value, Tensor) else CPU

        kinds = Tensor, torch.device
        with on_data():
            try:
                return func(*mapped(real, tuple(args), kinds), **mapped(real, dict(kwargs), kinds))
            except Exception:  # whatever a kernel raises: not every dtype has one
                return None

    def _keep(self, out: Any, made: Any) -> None:
        for name, value in zip(tensors_in(out), tensors_in(made), strict=True):
            self.keep(name, value)

    def _forget(self, func: Any, args: Sequence[Any]) -> None:
        """Tensors in the memory of those that an op writes unknown values to."""
        if func._schema.is_mutable:
            pairs = zip(func._schema.arguments, args, strict=False)
            written = {_place(x) for a, x in pairs if _writes(a) and isinstance(x, Tensor)}
            for tensor in [t for t in self._values if _place(t) in written]:
                del self._values[tensor]


@contextmanager
def on_data() -> Iterator[None]:
    """Within, functions of tensors run as they do without any mode."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bins(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """What makes the bins that code counts in; more only where it counts what is in none."""
    dtype = torch.int64 if weights is None else weights.dtype
    return (lambda: torch.empty(minlength, dtype=dtype, device=x.device)) if minlength else None


def _like(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device)
