"""Split through an op of one's own: a custom op, and one line that says what it does to parts.

    torchrun --nproc-per-node 2 examples/own_rule.py

Without a rule such an op is right, but what goes in and out is whole on every rank. The notation is
described in rules/notation.py. A package brings rules to all its users by an entry point instead:
see CONTRIBUTING.md. No network, no GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from shardwright.rules.testing import check_rule


@torch.library.custom_op("examples::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Open or close each channel: x * sigmoid(gate). Shapes: [..., h], [h] -> [..., h]."""
    return x * torch.sigmoid(gate)


@gated.register_fake
def _(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, gate = ctx.saved_tensors
    open_ = torch.sigmoid(gate)
    sums = (grad * x * open_ * (1 - open_)).sum(tuple(range(x.dim() - 1)))
    return grad * open_, sums


gated.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    """A feed-forward layer with a gate for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.gate = nn.Parameter(torch.randn(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, 64] -> the same."""
        return self.down(gated(self.up(x), self.gate))


def main() -> None:
    """What each rank does."""
    torch.manual_seed(0)
    whole, inputs = Layer(), (torch.zeros(3, 19, 64),)

    before = shardwright.plan(whole, tp=2, args=inputs, objective="memory")
    # The channels of x, of the gate and of the result are one axis, and the op is linear in x.
    shardwright.register_rule(gated, "... h, h -> ... h | linear 0")
    # Is that right? Tried on parts, with gradients; a test of yours would do this.
    x, gate = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    check_rule(gated, x, gate)

    plan = shardwright.plan(whole, tp=2, args=inputs, objective="memory")
    if dist.get_rank() == 0:
        print("without the rule:", before.opaque, describe(before))
        print("with it:         ", plan.opaque, describe(plan))

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shardwright.apply(copy.deepcopy(whole), plan, mesh)
    x = torch.randn(2, 7, 64)
    torch.testing.assert_close(model(x), whole(x), rtol=0, atol=1e-5)

    model(x).square().mean().backward()
    whole(x).square().mean().backward()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = shardwright.full_tensors(model, mine)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5)
    if dist.get_rank() == 0:
        print("outputs and gradients are equal")


def describe(plan: shardwright.Plan) -> str:
    """Bytes on the fullest rank, and the collectives of a forward."""
    calls = [f"{c.count} {c.kind}" for c in plan.predicted.collectives if c.phase == "forward"]
    return f"{max(plan.predicted.parameter_bytes):,} bytes a rank, {', '.join(calls) or 'no calls'}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # a rank that leaves at once would cut off others
    dist.destroy_process_group()
