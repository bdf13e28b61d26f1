"""Sums input gradients over ranks while weight gradients are computed.

In a backward pass, the gradient of a block's input is summed over the ranks, and the gradients of
the block's weights do not need that sum. The sum is therefore begun in one node of the autograd
graph and waited for in another, and linear layers leave the gradients of their weights to the nodes
in which the weights were read. Of the ready nodes, autograd runs the one with the highest number;
nodes are numbered in the order in which they were made. The nodes of the weights get numbers
between the two nodes of the sum. Megatron-LM does the same within a linear layer
(`megatron/core/tensor_parallel/layers.py`); here, layers that share an input share its sum.

This is done if a collective can run at the same time as other work. It is not done with the shared
memory of CPU ranks on one host, where the ranks compute the sum themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from shardwright.runtime.communication.collectives import begin_all_reduce
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.scopes import PerThread

Again = Callable[[Tensor], Tensor]


class _Sum:
    """A sum over `group` of the gradient of one tensor."""

    def __init__(self, group: Group, again: Again) -> None:
        self.group, self.again = group, again
        self.number = 0
        """Sequence number for nodes that should run while the sum is under way."""
        self.wait: Callable[[], None] | None = None


pending: Any = PerThread(sum=None)
"""The latest sum of this thread's forward passes that has had no backward pass yet."""


def overlaps(x: Tensor, group: Group) -> bool:
    """Return whether the gradient of `x` can be summed over `group` during other work."""
    if torch.compiler.is_compiling() or group.pg is None or torch.is_anomaly_enabled():
        return False
    return not x.is_cpu or group.channel is None


def summed_behind(x: Tensor, group: Group, again: Again) -> Tensor:
    """Return `x`; its gradient becomes the sum over `group` of its gradients on the ranks.

    `again` computes that sum, without overlap, if the gradient may be differentiated again.
    """
    total = _Sum(group, again)
    x = _Await.apply(x, total)
    node: Any = x.grad_fn
    total.number = node._sequence_nr()
    node._set_sequence_nr(max(0, total.number - 1))
    pending.sum = total
    return _Begin.apply(x, total)


class _End(Function):
    """One of the two ends of a sum, which does nothing in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum) -> Tensor:  # type: ignore[override]
        """Return a view of `x`."""
        ctx.total = total
        return x.view_as(x)


class _Await(_End):
    """The outer end of a sum, which runs second in backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient after the sum is complete."""
        total: _Sum = ctx.total
        if pending.sum is total:
            pending.sum = None
        if total.wait is not None:
            wait, total.wait = total.wait, None
            wait()
        return grad, None


class _Begin(_End):
    """The inner end of a sum, which runs first in backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Begin the sum, and return the tensor that will hold it once `_Await` has waited."""
        if torch.is_grad_enabled():  # the gradient may be differentiated again
            return ctx.total.again(grad), None
        out, ctx.total.wait = begin_all_reduce(grad, ctx.total.group)
        return out, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> Tensor:
    """Run `F.linear`, leaving the gradient of `weight` to the node that read it if possible.

    It does so whether or not a sum is pending: code that runs again for a backward pass must save
    the same tensors as in its first run.

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
    """A linear layer whose weight gradient is computed in another node."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reader: Any
    ) -> Tensor:
        """Return the result of `F.linear`."""
        ctx.save_for_backward(x, weight)
        ctx.reader, ctx.again = reader, False
        return writable(F.linear(x, weight, bias), x)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        """Return the gradients; the weight's is only a placeholder if it is owed."""
        x, weight = ctx.saved_tensors
        to_input, _, to_bias, _ = ctx.needs_input_grad
        ctx.again = ctx.again or torch.is_grad_enabled()
        if ctx.again:  # it will be differentiated again, and the weight then gets more gradient
            to_weight = _of_weight(grad, x)
        else:
            ctx.reader.owed = torch._C._current_graph_task_id(), grad, x
            to_weight = grad.new_zeros(()).expand(weight.shape)
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None
        return grad @ weight if to_input else None, to_weight, of_bias, None


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the weight gradient: [..., out], [..., in] -> [out, in]."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def paid(reader: Any, grad: Tensor) -> Tensor:
    """Return the gradient owed to `reader` in place of `grad`, or `grad` if none is owed.

    A debt of an earlier pass, which ended before it was paid, is dropped.
    """
    owed, reader.owed = reader.owed, None
    if owed is None or owed[0] != torch._C._current_graph_task_id():
        return grad
    return _of_weight(*owed[1:])


def writable(made: Tensor, x: Tensor) -> Tensor:
    """Return `made`, a function's result for `x`, as a non-view unless it is a view of `x`.

    Torch does not let code write in place into a view that an autograd function returned.
    """
    if torch.compiler.is_compiling():
        return made
    base = made._base
    if base is None or base is x or base is x._base:
        return made
    return torch.ops.aten._unsafe_view.default(made, made.shape)
