"""Gradients that are summed over ranks while gradients of weights are computed.

In a backward pass, the gradient of what a block was given is summed over the ranks, and what the
weights of the block get does not need that sum. So it is begun in one node of autograd's graph and
waited for in another, and linear layers leave the gradients of their weights to the nodes in which
these were read. Of the nodes that are ready, autograd runs the one with the highest number, which
is the order in which they were made; those of the weights are numbered between the two of the sum.
Megatron-LM does the same within a linear layer (`megatron/core/tensor_parallel/layers.py`); here,
layers that share an input share its sum.

It is done where a collective can run beside other work: not through the memory that CPU ranks of
one host share, where the ranks do the sum themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from shardwright.runtime.communication.collectives import begin_all_reduce
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.redistribution.writable import writable

Again = Callable[[Tensor], Tensor]


class _Last(threading.local):
    """The latest sum of this thread's forward passes whose backward pass has not come by."""

    sum: _Sum | None = None


class _Sum:
    """A sum over `group` of the gradient of one tensor."""

    def __init__(self, group: Group, again: Again) -> None:
        self.group, self.again = group, again
        self.number = 0
        """What nodes are numbered as that should run while it is under way."""
        self.wait: Callable[[], None] | None = None


pending = _Last()


def overlaps(x: Tensor, group: Group) -> bool:
    """Whether the gradient of `x` can be summed over `group` while other work is done."""
    if torch.compiler.is_compiling() or group.pg is None or torch.is_anomaly_enabled():
        return False
    return not x.is_cpu or group.channel is None


def summed_behind(x: Tensor, group: Group, again: Again) -> Tensor:
    """`x`, whose gradient is the sum over `group` of what it gets on each rank.

    `again` gives that sum where it may be differentiated again, and not beside other work.
    """
    total = _Sum(group, again)
    x = _Await.apply(x, total)
    node: Any = x.grad_fn
    total.number = node._sequence_nr()
    node._set_sequence_nr(max(0, total.number - 1))
    pending.sum = total
    return _Begin.apply(x, total)


class _End(Function):
    """One of the two ends of a sum: nothing forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum) -> Tensor:  # type: ignore[override]
        """`x` as it is."""
        ctx.total = total
        return x.view_as(x)


class _Await(_End):
    """The outer end."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient, once it is the sum."""
        total: _Sum = ctx.total
        if pending.sum is total:
            pending.sum = None
        if total.wait is not None:
            wait, total.wait = total.wait, None
            wait()
        return grad, None


class _Begin(_End):
    """The inner end."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """What will be the sum when `_Await` has waited for it."""
        if torch.is_grad_enabled():  # it may be differentiated again
            return ctx.total.again(grad), None
        out, ctx.total.wait = begin_all_reduce(grad, ctx.total.group)
        return out, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """`F.linear`, which leaves the gradient of `weight` to the node that read it, if it can.

    Whether there is a sum to be filled or not: what runs again for a backward pass must keep the
    same tensors as it did at first.

    Shapes: [..., in] -> [..., out]; weight [out, in]; bias [out].
    """
    if group is None or not overlaps(x, group):
        return F.linear(x, weight, bias)
    total, node = pending.sum, weight.grad_fn
    if not hasattr(node, "owed") or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    reader: Any = node
    if total is not None:
        reader._set_sequence_nr(total.number)
    return _Linear.apply(x, weight, bias, reader)


class _Linear(Function):
    """A linear layer whose weight's gradient is computed elsewhere."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reader: Any
    ) -> Tensor:
        """What `F.linear` gives."""
        ctx.save_for_backward(x, weight)
        ctx.reader, ctx.again = reader, False
        return writable(F.linear(x, weight, bias), x)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        """The gradients; of the weight only a stand-in of its shape, where it is owed."""
        x, weight = ctx.saved_tensors
        to_input, _, to_bias, _ = ctx.needs_input_grad
        ctx.again = ctx.again or torch.is_grad_enabled()
        if ctx.again:  # it will be differentiated again, and more comes to the weight then
            to_weight = _of_weight(grad, x)
        else:
            ctx.reader.owed = torch._C._current_graph_task_id(), grad, x
            to_weight = grad.new_zeros(()).expand(weight.shape)
        return (
            grad @ weight if to_input else None,
            to_weight,
            grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None,
            None,
        )


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """[..., out], [..., in] -> [out, in]."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def paid(reader: Any, grad: Tensor) -> Tensor:
    """The gradient that came to `reader`, or the one that is owed in place of it.

    Of another pass, which ended before it came here, nothing is kept.
    """
    owed, reader.owed = reader.owed, None
    if owed is None or owed[0] != torch._C._current_graph_task_id():
        return grad
    return _of_weight(*owed[1:])
