"""Plan and split an `nn.Module` of one's own, from example inputs, with a pin.

    torchrun --nproc-per-node 2 examples/own_module.py

The module needs no config and no checkpoint. Every rank makes the same one and the same plan, since
planning gives the same plan on every run. No network, no GPU.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import shardwright


class Block(nn.Module):
    """Attention and a gated feed-forward layer, written out."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] -> the same."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Encoder(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, 64] -> [batch, tokens, 10]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """What each rank does."""
    torch.manual_seed(0)
    whole = Encoder()
    # 3 sequences of 19 tokens: sizes that vary at run time are traced with these two, which
    # nothing else has. "head" is small: keep it whole on every rank.
    plan = shardwright.plan(
        whole, tp=2, args=(torch.zeros(3, 19, 64),), objective="memory", pins={"head": "replicate"}
    )  # for least time, the default, so small a model would stay whole
    if dist.get_rank() == 0:
        for name, module in plan.modules.items():
            for parameter, entry in module.parameters.items():
                print(f"{name}.{parameter:8} {entry.placement}")

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shardwright.apply(copy.deepcopy(whole), plan, mesh)  # changed in place, and given back

    x = torch.randn(2, 7, 64)  # other sizes than the trace had
    y, wanted = model(x), whole(x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5)

    y.square().mean().backward()
    wanted.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = shardwright.full_tensors(model, gradients)  # all ranks call it
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5)
    shape = tuple(model.get_parameter("blocks.0.qkv.weight").shape)
    print(f"rank {dist.get_rank()}: {shape} of (192, 64); outputs and gradients are equal")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # a rank that leaves at once would cut off others
    dist.destroy_process_group()
