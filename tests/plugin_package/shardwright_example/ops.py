"""An op of our own, and what it does to sharded tensors."""

import torch
from torch import Tensor


@torch.library.custom_op("shardwright_example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate). Shapes: [..., h], [h] -> [..., h]."""
    return x * torch.sigmoid(gate)


@gated.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    s = torch.sigmoid(gate)
    return grad * s, (grad * x * s * (1 - s)).sum(tuple(range(x.dim() - 1)))


gated.register_autograd(_backward, setup_context=_keep)

RULES = {"gated": "... h, h -> ... h | linear 0"}
