"""Shape-only kernels for calls that torch's refuse although the real kernels accept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROUPED_MM = torch.ops.aten._grouped_mm.default
GROUPED_MM_TAKES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16
"""Bytes that rows of a grouped product must be a multiple of, on every device."""


def ctc_loss(scores: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the result shapes of CTC loss, which has no shape-only kernel.

    Shapes: [times, n, classes] x [n, most] -> [n], [n, times, 2 most + 1].
    """
    times, n = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
    most = targets.shape[-1]  # an upper bound if targets are concatenated
    shape = (n,) if scores.dim() == 3 else ()
    return scores.new_empty(shape), scores.new_empty(n, times, 2 * most + 1)


SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.default: ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: ctc_loss,
}
"""Op without a shape-only kernel -> function that returns empty tensors of its result shapes."""


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty tensor with the result shape of torch's grouped product.

    Shapes: [rows, k] x [groups, k, n] -> [rows, n], [groups, m, k] x [k, n] -> [m, n],
    [m, k] x [k, n] with k in groups -> [groups, m, n], [groups, m, k] x [groups, k, n] ->
    [groups, m, n].

    Raises:
        RuntimeError: as the real kernel: another dtype, sizes that do not match, or rows that are
            not aligned.
    """
    if x.dtype not in GROUPED_MM_TAKES:
        raise RuntimeError(
            f"torch's grouped product takes float32, bfloat16 or float16, not {x.dtype}: "
            "choose another implementation of experts, or another dtype"
        )
    split = x.dim() == weight.dim() == 2  # the contracted dim is grouped
    if x.shape[-1] != weight.shape[-2]:
        raise RuntimeError(f"cannot multiply {list(x.shape)} by {list(weight.shape)}")
    if x.dim() == weight.dim() == 3 and x.shape[0] != weight.shape[0]:
        raise RuntimeError(f"{x.shape[0]} groups meet {weight.shape[0]}")
    for operand in (x, weight):
        stride = max(operand.stride()[-2:])
        if stride * operand.element_size() % ALIGNMENT:
            raise RuntimeError(f"strides should be multiple of {ALIGNMENT} bytes")
    shape = [x.shape[-2], weight.shape[-1]]
    if split:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif x.dim() == weight.dim():
        shape = [x.shape[0], *shape]
    return x.new_empty(shape, dtype=out_dtype or x.dtype)
