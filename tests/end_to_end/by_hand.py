"""What each rank of `test_by_hand` does: collectives of users on parameters and gradients."""
# pyright: reportArgumentType=false

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from tests import planning

ROWS = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).double()


def main(_: Path) -> None:
    """Two copies of a model over two ranks each, which the plan does not know of each other."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    plan = planning.plan(copy.deepcopy(whole), tp=2, args=(ROWS[0],))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "tp"))
    split = shardwright.apply(copy.deepcopy(whole), plan, mesh["tp"])
    copies = mesh["copies"].get_group()
    whole(ROWS).tanh().mean().backward()
    split(ROWS[mesh["copies"].get_local_rank()]).tanh().mean().backward()
    for p, w in zip(split.parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and w.grad is not None
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, group=copies)
        same(p.grad.div_(2), w.grad)
        found = [torch.empty_like(p) for _ in range(2)]
        work: Any = dist.all_gather(found, p.detach(), group=copies, async_op=True)
        work.wait()
        for one in found:
            same(one, w.detach())
        with torch.no_grad():
            p.mul_(dist.get_rank() // 2)
        dist.broadcast(p.data, src=2 + dist.get_rank() % 2, group=copies)
        same(p, w.detach())
    dist.barrier()
    dist.destroy_process_group()


def same(part: Any, want: torch.Tensor) -> None:
    """Compare a split tensor with a full one."""
    torch.testing.assert_close(part.full_tensor().detach(), want, rtol=0, atol=1e-12)
