"""Results of torch's functions in dry runs, kept for later calls with equal arguments.

Torch runs most functions as several ops, and the modes of a dry run see each. A plan makes
thousands of calls, nearly all with the shapes of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (  # pyright: ignore
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._subclasses import FakeTensor
from torch.nn import functional

from shardwright.planner.trace.data_queries.known_values import place
from shardwright.planner.trace.record.fake_mode import Elsewhere, OnMeta, keep
from shardwright.planner.trace.record.op_tensors import tensors_in

NAMES = """
linear scaled_dot_product_attention matmul bmm add sub rsub mul div true_divide pow neg rsqrt mean
sum silu gelu relu sigmoid tanh softmax softplus cos sin exp cat reshape to float view transpose
permute unsqueeze expand flatten layer_norm rms_norm
""".split()
"""Functions that return one tensor, which depends on their arguments alone."""

OWNERS: tuple[Any, ...] = (torch, Tensor, functional, torch._C._nn)  # pyright: ignore
FUNCTIONS = frozenset(getattr(o, n) for o in OWNERS for n in NAMES if hasattr(o, n))


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `func(*args, **kwargs)`, without a call if its result is kept.

    No results are kept with gradients, in other dispatch modes, and if the values of all tensors
    are known, because the value of the result is then known too.
    """
    mode: Any = func in FUNCTIONS and _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
    if not isinstance(mode, OnMeta) or _len_torch_dispatch_stack() != 1 or torch.is_grad_enabled():
        return func(*args, **kwargs)
    given = tensors_in((args, kwargs))
    if torch.is_inference_mode_enabled() or all(x in mode.known for x in given):
        return func(*args, **kwargs)
    try:
        key = mode.key(func, args, kwargs)
    except Elsewhere:
        return func(*args, **kwargs)
    if (kept := mode.kept(key, args)) is not None:
        return kept
    out = func(*args, **kwargs)
    if type(out) is FakeTensor and mode.is_plain(out) and not out.dtype.is_complex:
        shared = [x for x in given if place(x) == place(out)]
        if not shared:
            keep(key, out, None)
        elif len(shared) == 1 and shared[0] is args[0] is not out and out.dtype == args[0].dtype:
            keep(key, out, args[0])
    return out
