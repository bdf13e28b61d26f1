"""Cross entropy of logits that are sharded by class; full logits never exist.

It takes two all-reduces: of one number per token (the largest logit), then of two or three (sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.planner.contract.dims import Range
from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.mesh import Group


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ranges: Sequence[Range],
    group: Group | Sequence[Group],
    *,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` on local logits.

    Args:
        logits: [tokens, classes of this rank], or without the first dim.
        labels: [tokens], class indices; the same on each rank.
        ranges: The class indices of this rank's columns, in their order.
        group: The ranks over which the classes are sharded; one group for each mesh dim.
        classes: The number of all classes.
        weight: [classes], a weight for each class; full.
        ignore_index: The label of tokens that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: In [0, 1], the share of the target spread over all classes.

    Returns:
        A scalar, or [tokens] for "none", in the dtype of the logits.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    groups = [group] if isinstance(group, Group) else list(group)
    counts = labels != ignore_index
    _check_labels(labels, counts, classes)
    tokens = (logits.reshape(labels.numel(), logits.shape[-1]), labels.reshape(-1))
    options = _Options(tuple(ranges), groups, ignore_index, label_smoothing, classes)
    losses = _TokenLoss.apply(*tokens, weight, options).view(labels.shape)
    if reduction == "none":
        return losses.to(logits.dtype)
    total = losses.sum()
    if reduction == "mean":
        of = counts if weight is None else weight[labels.masked_fill(~counts, 0)] * counts
        total = total / of.sum()
    return total.to(logits.dtype)


def _check_labels(labels: Tensor, counts: Tensor, classes: int) -> None:
    # On an accelerator, checking labels would synchronize with it; wrong labels give NaN there.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[counts & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


class _Options(NamedTuple):
    """Arguments of `vocab_parallel_cross_entropy` that are no tensors."""

    ranges: tuple[Range, ...]
    groups: list[Group]
    ignore_index: int
    smoothing: float
    classes: int


class _TokenLoss(torch.autograd.Function):
    """The loss of each token, [tokens]; at least float32, in which `cross_entropy` accumulates."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor | None, options: _Options
    ) -> Tensor:
        ranges, groups, ignore_index, smoothing, classes = options
        x = _wide(logits)
        counts = labels != ignore_index
        column, held = _columns(labels, ranges)
        top = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))
        top = _over(top, groups, "max")
        x = x - top.unsqueeze(-1)
        target = torch.zeros_like(top)
        if x.shape[-1]:  # a rank may have no classes
            target = x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        sums = [x.exp().sum(-1), target.masked_fill(~held, 0)]
        own = None if weight is None else torch.cat([weight[a:b] for a, b in ranges]).to(x.dtype)
        if smoothing:
            sums.append(x.sum(-1) if own is None else (x * own).sum(-1))
        sums = list(_over(torch.stack(sums), groups, "sum").unbind(0))
        log_sum = sums[0].log()
        factor, spread = _factors(labels, counts, weight, options, x.dtype)
        losses = factor * (log_sum - sums[1])
        if smoothing:
            total = classes if weight is None else weight.sum().to(x.dtype)
            losses = losses + spread * (total * log_sum - sums[2])
        valid = (labels >= 0) & (labels < classes)
        losses = losses.masked_fill(~valid, float("nan")).masked_fill(~counts, 0)
        ctx.save_for_backward(logits, labels, weight, top + log_sum)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, labels, weight, log_sum = ctx.saved_tensors
        ranges, _, ignore_index, smoothing, classes = ctx.options
        counts = labels != ignore_index
        column, held = _columns(labels, ranges)
        softmax = (_wide(logits) - log_sum.unsqueeze(-1)).exp()
        factor, spread = _factors(labels, counts, weight, ctx.options, softmax.dtype)
        # If no token counts, the gradient of the mean arrives as inf or NaN; it must be 0.
        grad = grad.masked_fill(~counts, 0)
        of = factor
        if smoothing:
            of = of + spread * (classes if weight is None else weight.sum().to(softmax.dtype))
        out = softmax * (grad * of).unsqueeze(-1)
        if smoothing:
            own = 1 if weight is None else torch.cat([weight[a:b] for a, b in ranges]).to(out.dtype)
            out = out - (grad * spread).unsqueeze(-1) * own
        if out.shape[-1]:
            hit = (-grad * factor).masked_fill(~held, 0)
            out = out.scatter_add(-1, column.unsqueeze(-1), hit.unsqueeze(-1))
        return out.to(logits.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _over(x: Tensor, groups: Sequence[Group], op: str) -> Tensor:
    for group in groups:
        x = all_reduce(x, group, op)
    return x


def _columns(labels: Tensor, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
    """For each label, its local column (0 if it is not on this rank), and whether it is."""
    column, held, width = torch.zeros_like(labels), torch.zeros_like(labels, dtype=torch.bool), 0
    for start, stop in ranges:
        inside = (labels >= start) & (labels < stop)
        column = torch.where(inside, labels - start + width, column)
        held = held | inside
        width += stop - start
    return column, held


def _factors(
    labels: Tensor, counts: Tensor, weight: Tensor | None, options: _Options, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Per token, the factors of the negative log-likelihood of the target and of each class."""
    smoothing, classes = options.smoothing, options.classes
    of = ones = torch.ones_like(labels, dtype=dtype)
    if weight is not None:
        of = weight[labels.masked_fill(~counts, 0).clamp(0, classes - 1)].to(dtype)
    return of * (1 - smoothing), ones * (smoothing / classes)
