"""A fast fake tensor mode for tensors on meta, with the same results as torch's own mode.

Torch's mode supports all devices and symbolic sizes, which takes several times as long as an op's
shape-only kernel. On meta the kernel alone is enough. Many kernels are written in Python, so their
results are cached by their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch  # pyright: ignore
from torch._decomp import decomposition_table, meta_table
from torch._library.simple_registry import singleton as registered
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode, fake_impls
from torch._subclasses.fake_tensor import in_kernel_invocation_manager, torch_decomp_decompositions
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.planner.trace.data_queries.known_values import KnownValues
from shardwright.planner.trace.record.fake_ops import GROUPED_MM, SHAPES, grouped_mm

aten = torch.ops.aten

META, CPU = torch.device("meta"), torch.device("cpu")

MOVES = (aten.copy_.default, aten.set_.source_Tensor)
"""Ops that accept tensors on several devices."""

ON_ONE_DEVICE = (aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
"""Ops whose scalars on the CPU torch moves to a GPU, but not to meta."""

DEVICE = torch.ops.prim.device.default
"""Called on fake tensors more often than all other ops, because torch's own code checks devices."""

FOR_SYMBOLS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
"""Ops that torch's mode special-cases for symbolic sizes; their kernels give the same results."""

FOR_DEVICES = {
    aten.copy.default,
    aten.copy_.default,
    aten.slice_scatter.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
}
"""Ops that torch's mode special-cases because their tensors may be on several devices."""

MAX_CACHED_RESULTS = 20_000
"""The most results that are cached; then all are dropped."""

VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.detach.default,
}
"""Frequent ops that return the memory of their first tensor in the same dtype."""

PLAIN_TYPES = frozenset(
    (int, float, bool, str, type(None))
    + (torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments besides tensors for which results are cached. Subclasses of numbers may record
that they are read."""

_kept: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype, int | None]] = {}
"""Op and arguments -> shape, strides and dtype of the tensor that the op returned. If it is in the
memory of the first tensor also where it begins, counted from where the first tensor begins."""


class OnMeta(FakeTensorMode):
    """A `FakeTensorMode` that calls shape-only kernels directly if all tensors are on meta."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known = KnownValues(self)
        self._common: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to guard each op against compilation: no, the guard is as slow as some ops."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of an op."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return self.seen(func, types, args, kwargs or {})

    def seen(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of any op but `DEVICE`; subclasses override this."""
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the fake results of an op."""
        kwargs = kwargs or {}
        if func in SHAPES:
            with self:
                return SHAPES[func](*args, **kwargs)
        given: Hashable = None
        try:
            here = types or kwargs.get("device") == META
            if not (here and isinstance(func, OpOverload) and func.namespace == "aten"):
                raise Elsewhere
            given = self.key(func, args, kwargs)
            if by_mask(func, args):
                given = None
            elif (kept := self.kept(given, args)) is not None:
                return kept
            if not by_kernel(func):
                raise Elsewhere
            with in_kernel_invocation_manager(self):
                made = func(*args, **kwargs)
        except Exception:  # torch's own mode raises the proper error
            there, named = self.moved(func, args, kwargs, self._on_meta)
            made: Any = super().dispatch(func, types, there, named)
            if there is not args:
                return args[0] if _gives_first(func) else made
            if given and type(made) is FakeTensor and self.is_plain(made) and makes_new(func):
                keep(given, made, None)
            return made
        if given and type(made) is Tensor and (func in VIEWS or makes_new(func)):
            keep(given, made, args[0] if func in VIEWS else None)
        return self._faked(made)

    def kept(self, key: Hashable, args: Sequence[Any]) -> FakeTensor | None:
        """Return the result of an earlier call with this `key` anew; None if there is none."""
        if (found := _kept.get(key)) is None:
            return None
        shape, stride, dtype, start = found
        with _DisableTorchDispatch():
            if start is None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device=META)
            else:
                made = torch.as_strided(args[0], shape, stride, args[0].storage_offset() + start)
        return self.fake(made)

    def moved(
        self, func: Any, args: Any, kwargs: Any, move: Callable[[Tensor], Tensor]
    ) -> tuple[Any, Any]:
        """Return the arguments of an op with CPU tensors moved to meta, if both devices occur.

        `move` moves one tensor. This supports model code that creates tensors on the default device
        while the model is on meta.
        """
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {x.fake_device if isinstance(x, FakeTensor) else x.device for x in given}
        if len(given) < 2 or places != {META, CPU} or func in MOVES:
            return args, kwargs

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor) or not (value.dim() or func in ON_ONE_DEVICE):
                return value
            place = value.fake_device if isinstance(value, FakeTensor) else value.device
            return value if place == META else move(value)

        return tree_map(there, (args, kwargs))

    def _on_meta(self, value: Tensor) -> Tensor:
        shape, stride = value.shape, value.stride()
        with _DisableTorchDispatch():
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device=META)
        return self.fake(made)

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """Return a key of a call that determines the shapes of results.

        Raises:
            Elsewhere: a tensor is not plain, or an argument is of another type.
        """
        device = kwargs.get("device")
        if device is not None and device != META:
            raise Elsewhere
        found = [self._tensor_or_number(v) for v in args]
        found += [(k, self._tensor_or_number(v)) for k, v in kwargs.items()]
        return func, torch.get_default_dtype(), tuple(found)

    def _tensor_or_number(self, value: Any) -> Hashable:
        if type(value) is FakeTensor and self.is_plain(value):
            return value.shape, value.stride(), value.dtype
        if isinstance(value, (tuple, list)):
            return tuple(map(self._tensor_or_number, value))
        if type(value) not in PLAIN_TYPES:
            raise Elsewhere
        return type(value), value

    def _faked(self, made: Any) -> Any:
        if isinstance(made, (tuple, list)):
            return type(made)(map(self._faked, made))
        if isinstance(made, Tensor) and not isinstance(made, FakeTensor):
            return self.fake(made)
        return made

    def fake(self, made: Tensor, **how: Any) -> FakeTensor:
        """Return `FakeTensor(self, made, META, **how)`, but faster.

        Attributes that all fake tensors share are set in one update.
        """
        if self._common is None:
            out = FakeTensor(self, made, META)
            self._common = {**vars(out)}
        wants = how.pop("requires_grad", made.requires_grad)
        out: Any = Tensor._make_subclass(
            FakeTensor, made, wants, dispatch_device=True, device_for_backend_keys=META
        )
        torch._C._set_throw_on_mutable_data_ptr(out)
        vars(out).update(self._common, **how)
        return out

    def is_plain(self, value: FakeTensor) -> bool:
        """Return whether a fake tensor is of this mode, on meta, strided and without a value."""
        here = value.fake_mode is self and value.fake_device == META
        return here and value.constant is None and value.layout == torch.strided


def keep(key: Hashable, made: Tensor, first: Tensor | None) -> None:
    """Keep the result of a call; with `first`, it is in the memory of this first argument."""
    if made.layout == torch.strided:
        if len(_kept) >= MAX_CACHED_RESULTS:  # most are of models that were planned before
            _kept.clear()
        start = None if first is None else int(made.storage_offset() - first.storage_offset())
        _kept[key] = made.shape, made.stride(), made.dtype, start


class TooManyOps(Exception):
    """Code calls more ops than it may."""


class LikeReal(OnMeta):
    """Fake tensor mode that also computes the known values of tensors.

    The shape-only kernel of `_grouped_mm` (experts) accepts only bfloat16. The real kernels also
    take float32 and float16, but nothing else (torch 2.13).
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.left = most

    def seen(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the op, or of its replacement.

        Raises:
            TooManyOps: these are more than `most`, if that is given.
        """
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise TooManyOps
        if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
            with self:
                return grouped_mm(*args, **kwargs)
        fake = partial(self.dispatch, func, types, args, kwargs)
        return self.known.result(func, args, kwargs, fake)[0]


class Elsewhere(Exception):
    """A call is not all on meta, or torch's mode handles its op in its own way."""


def by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call takes what a mask selects: the shape then depends on values."""
    masks = (torch.bool, torch.uint8)
    return func is aten.index.Tensor and any(x is not None and x.dtype in masks for x in args[1])


@cache
def by_kernel(op: OpOverload) -> bool:
    """Return whether torch's mode also takes the result of `op` from the shape-only kernel.

    It does not if it prefers a decomposition, an own implementation (except for ops that create
    tensors) or a registered fake kernel.
    """
    if op.namespace != "aten" or not fake_impls.has_meta(op) or op in FakeTensorMode.lift_fns:
        return False
    if registered.find(op.name()).fake_impl.kernel:
        return False
    if op in FOR_SYMBOLS | FOR_DEVICES:
        return True
    makes = fake_impls._is_tensor_constructor(op) or op in fake_impls._like_tensor_constructors
    if not makes and any(applies(op) for applies, _ in fake_impls.op_implementations_checks):
        return False
    if op in meta_table or op in FakeTensorMode._cpp_meta_supports_symint:
        return True
    decomposed = op in decomposition_table and torch_decomp_decompositions(op)
    return not decomposed and (makes_new(op) or not op._can_decompose())


@cache
def _gives_first(op: OpOverload) -> bool:
    """Return whether `op` changes its first tensor in place and returns it."""
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and op._schema.is_mutable


@cache
def makes_new(op: OpOverload) -> bool:
    """Return whether `op` returns one tensor in new memory and changes none."""
    returns = op._schema.returns
    shares = op is aten._unsafe_view.default or any(r.alias_info for r in returns)
    return not (op._schema.is_mutable or shares) and len(returns) == 1
