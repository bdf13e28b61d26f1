"""Functions of torch on meta that are called again with the like: what they give, without torch.

A function that model code calls goes through torch's dispatcher, often as several ops, each through
a fake mode: tens of microseconds, and a dry run makes thousands. Where one gave a new tensor, or
its first argument in another shape, it does so again whenever it is given tensors of the same
shapes, strides and dtypes, and the same of all else. So the tensor is made right away.

All that is not plain goes the usual way: gradients, tensors with values, other modes, and whatever
is not among `GIVES`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import (  # pyright: ignore
    _DisableTorchDispatch,
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._subclasses import FakeTensor
from torch.nn import functional

from shardwright.planner.trace.record.arguments import tensors_in
from shardwright.planner.trace.record.fake_mode import META, MOST, Elsewhere, OnMeta

NAMES = """
linear scaled_dot_product_attention matmul bmm add sub rsub mul div true_divide pow neg rsqrt mean
sum silu gelu relu sigmoid tanh softmax softplus cos sin exp cat contiguous reshape to float view
transpose permute unsqueeze expand flatten layer_norm rms_norm
""".split()
"""They give one tensor that hangs on nothing but their arguments, and change none."""

FAMILIES: tuple[Any, ...] = (torch, Tensor, functional, torch._C._nn)  # pyright: ignore
GIVES = frozenset(getattr(f, n) for f in FAMILIES for n in NAMES if hasattr(f, n))


PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format)
)
"""What may be given besides tensors: other numbers may tell somebody that they were asked for."""


class Given(NamedTuple):
    """What came of a call: a tensor like this, in memory of its own or in that of the first one.

    There it begins so many elements behind it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    behind: int | None


SAME = "same"
"""Came of a call that gave the tensor that it was given."""

_given: dict[Hashable, Given | str] = {}
"""Function and what it was given -> what came of it."""


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)`, as model code calls it on fake tensors."""
    if func not in GIVES or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return func(*args, **kwargs)
    mode: Any = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
    if not isinstance(mode, OnMeta) or _len_torch_dispatch_stack() != 1:
        return func(*args, **kwargs)
    try:
        given = [_like(mode, v) for v in args], *((k, _like(mode, v)) for k, v in kwargs.items())
    except Elsewhere:
        return func(*args, **kwargs)
    like = func, torch.get_default_dtype(), tuple(given[0]), given[1:]
    if (found := _given.get(like)) is not None:
        return args[0] if isinstance(found, str) else _made(mode, found, args)
    out = func(*args, **kwargs)
    if len(_given) < MOST and (kept := _kept(mode, out, args, kwargs)) is not None:
        _given[like] = kept
    return out


def _like(mode: OnMeta, value: Any) -> Hashable:
    """What results follow from.

    Raises:
        Elsewhere: something is not plain, or a tensor has a value.
    """
    kind = type(value)
    if kind is FakeTensor:
        if not mode.is_plain(value) or value in mode.known:
            raise Elsewhere
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple([_like(mode, v) for v in value])
    if kind not in PLAIN:
        raise Elsewhere
    return kind, value


def _made(mode: OnMeta, given: Given, args: Sequence[Any]) -> Tensor:
    shape, stride, dtype, behind = given
    with _DisableTorchDispatch():
        if behind is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        else:
            made = torch.as_strided(args[0], shape, stride, args[0].storage_offset() + behind)
    return mode.fake(made)


def _kept(
    mode: OnMeta, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Given | str | None:
    """What is to be known of a result to make it again; None where there is more to it."""
    if args and out is args[0]:
        return SAME
    if type(out) is not FakeTensor or not mode.is_plain(out) or out in mode.known:
        return None
    if out.layout != torch.strided or out.dtype.is_complex:
        return None
    place = out.untyped_storage()._cdata
    shared = [t for t in tensors_in((args, kwargs)) if t.untyped_storage()._cdata == place]
    if not shared:
        return Given(out.shape, out.stride(), out.dtype, None)
    if len(shared) > 1 or shared[0] is not args[0] or out.dtype != shared[0].dtype:
        return None
    behind = int(out.storage_offset() - shared[0].storage_offset())
    return Given(out.shape, out.stride(), out.dtype, behind)
