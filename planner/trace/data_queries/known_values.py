"""Values of tensors that model code computes from plain numbers only: positions, masks, offsets.

A trace has no data, but these values do not depend on data. They are computed along with the
shapes, so that ops whose result length depends on values (`nonzero`) have a result. Like sizes,
the values are those for the traced inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.planner.trace.data_queries.model_code import torch_goes_on
from shardwright.planner.trace.record.op_tensors import mapped, tensors_in

MAX_ELEMENTS = 1 << 16
"""Values of results with this many elements or more are not kept, unless operands have as many."""

CPU = torch.device("cpu")

aten = torch.ops.aten
LIFTED = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""Ops that take the tensor that `torch.tensor` and similar functions have just filled."""

DRAWS = torch.Tag.nondeterministic_seeded
UNIFORM = {aten.rand.default, aten.rand.generator}
BELOW_ALL = {aten.lt.Scalar: False, aten.ge.Scalar: True}
"""Comparison -> its result for uniform random numbers in [0, 1) if the bound is not above 0."""


OF_SIZES: ContextVar[frozenset[tuple[int, int]] | None] = ContextVar("of_sizes", default=None)
"""The reads (number of the tensor, dim) of sizes that the current function of torch is given; None
if it is given no sizes. Of an index there are none here: its bounds have facts of their own."""


class KnownValues:
    """The known values of fake tensors; tensors that are created within `fakes` are fake."""

    def __init__(self, fakes: AbstractContextManager[Any]) -> None:
        self._values = WeakIdKeyDictionary()
        self._ids = set[int]()
        """Ids of all tensors that ever had a value: a fast test, because most tensors have none."""
        self._uniform = WeakIdKeyDictionary()
        """Tensors of random numbers in [0, 1)."""
        self._varying = WeakIdKeyDictionary()
        """Tensors whose values may be others for other example inputs, by their values or sizes."""
        self.looked: Callable[[], None] = lambda: None
        """Called where code may do something else for other such values."""
        self._fakes = fakes

    def result(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Return the result of an op, and whether its shape was known only from values.

        `fake` computes the result without values.
        """
        given = tensors_in((args, kwargs))
        if given and only_computes(func) and self._ids.isdisjoint(map(id, given)):  # most calls
            with suppress(DynamicOutputShapeException, DataDependentOutputException):
                return fake(), False
        all_known = func in LIFTED or all(t in self for t in given)
        known = all_known and DRAWS not in func.tags and "empty" not in func.__name__
        fixed = not known or (bool(given) and not any(t in self._varying for t in given))
        sizes = OF_SIZES.get()
        fixed = fixed and not (sizes or (func in LIFTED and sizes is not None))
        try:
            out = fake()
        except (DynamicOutputShapeException, DataDependentOutputException):
            made = self._computed(func, args, kwargs) if known else None
            if made is not None:
                device = given[0].device
                with self._fakes:
                    out = tree_map(lambda v: _like(v, device), made)
                self._keep(out, made, fixed)
                if not fixed:
                    self.looked()
                return out, True
            if func is aten.bincount.default and (bins := _bins(*args, **kwargs)) is not None:
                with self._fakes:
                    return bins(), False
            is_truth = func is aten._local_scalar_dense.default and args[0].dtype == torch.bool
            if is_truth and (answer := torch_goes_on()) is not None:
                return answer, True
            raise
        if func in UNIFORM or (func is aten.detach.default and args[0] in self._uniform):
            self._uniform[out] = True
        if func in BELOW_ALL and args[0] in self._uniform and args[1] <= 0:  # dropout of 0
            with on_data():
                made = torch.full(tuple(out.shape), BELOW_ALL[func])
        elif known:
            most = max(MAX_ELEMENTS, *(t.numel() + 1 for t in given), 0)
            small = sum(t.numel() for t in tensors_in(out)) < most
            made = self._computed(func, args, kwargs) if small else None
        else:
            made = None
        if made is None:
            self._forget(func, args)
        else:
            self._keep(out, made, fixed)
            if func in LIFTED and not fixed:
                out.constant = None
        return out, False

    def keep(self, tensor: Tensor, value: Tensor, fixed: bool = True) -> None:
        """Note that `tensor` has this value; `fixed` if it has that for all example inputs."""
        self._values[tensor] = value
        self._ids.add(id(tensor))
        if not fixed:
            self._varying[tensor] = True

    def keep_uninitialized(self, indices: Tensor) -> None:
        """Note zeros as the values of indices that code fills later: any values are right."""
        integral = not (indices.dtype.is_floating_point or indices.dtype.is_complex)
        if integral and indices.numel() < MAX_ELEMENTS:
            with on_data():
                self.keep(indices, torch.zeros(indices.shape, dtype=indices.dtype), fixed=False)

    def keep_number(self, buffer: Tensor, value: Tensor) -> None:
        """Note the value of a buffer that is one number: code may write to the buffer."""
        with on_data():
            self.keep(buffer, value.clone())

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of `tensor`; None if it is not known."""
        return self._values.get(tensor)

    def look(self, tensor: Tensor) -> Tensor | None:
        """Return the value of `tensor`, for code that may do something else for another value."""
        if tensor in self._varying:
            self.looked()
        return self._values.get(tensor)

    def drop(self, tensor: Tensor) -> None:
        """Forget the values of `tensor` and of all tensors that share its memory."""
        memory = place(tensor)
        for one in [t for t in self._values if place(t) == memory]:
            del self._values[one]

    def same(self, made: Tensor, given: Tensor) -> None:
        """Note that `made` has the value of `given`, if that is known."""
        if given in self:
            self.keep(made, self._values[given], given not in self._varying)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids and tensor in self._values

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result computed on values; None if the CPU cannot compute it."""

        def real(value: Any) -> Any:
            return self._values.get(value, value) if isinstance(value, Tensor) else CPU

        kinds = Tensor, torch.device
        with on_data():
            try:
                return func(*mapped(real, tuple(args), kinds), **mapped(real, dict(kwargs), kinds))
            except Exception:  # any exception of a kernel: not every dtype has one
                return None

    def _keep(self, out: Any, made: Any, fixed: bool) -> None:
        for name, value in zip(tensors_in(out), tensors_in(made), strict=True):
            self.keep(name, value, fixed)

    def _forget(self, func: Any, args: Sequence[Any]) -> None:
        """Forget the values of tensors in memory that an op writes unknown values to."""
        pairs = zip(func._schema.arguments, args, strict=False) if func._schema.is_mutable else ()
        for argument, x in pairs:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(x, Tensor):
                self.drop(x)


@cache
def only_computes(op: Any) -> bool:
    """Return whether `op` writes to no tensor, and of its results only values may be known."""
    special = (aten.detach.default, *LIFTED, *UNIFORM, *BELOW_ALL)
    return op not in special and not op._schema.is_mutable


@contextmanager
def on_data() -> Iterator[None]:
    """Context manager in which tensor functions run without any mode."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def place(tensor: Tensor) -> int:
    """Return a number for the memory of a tensor; views of it have the same."""
    return tensor.untyped_storage()._cdata


def _bins(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Return a function that creates the result of `bincount` with `minlength` bins, or None.

    The real result is longer only if a value is not below `minlength`.
    """
    dtype = torch.int64 if weights is None else weights.dtype
    return (lambda: torch.empty(minlength, dtype=dtype, device=x.device)) if minlength else None


def _like(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device)
