"""What the ranks of `test_errors.py` run; a module of its own, which processes can import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright
from shardwright import DistributedError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.numeric import random_model


def die_in_forward(plan: Plan, config: Any, report: Path) -> None:
    """Rank 1 dies in the middle of a forward pass; the others write down how they ended."""
    model = shardwright.apply(random_model(config, torch.float32), plan)
    if dist.get_rank() == 1:
        layer = model.get_submodule("model.layers.1")
        layer.register_forward_pre_hook(lambda *_: os._exit(3))
    start = time.monotonic()
    try:
        model(torch.zeros(1, 5, dtype=torch.int64))
    except DistributedError as error:
        path = report / f"rank-{dist.get_rank()}"
        path.write_text(f"{time.monotonic() - start} {error}")
        raise


def raise_at_once() -> None:
    if dist.get_rank() == 1:
        raise shardwright.PlanError("rank 1 does not like the plan")
    dist.barrier()


def load_with_too_few(model: Path, plan: Plan) -> tuple[int, str, bytes]:
    """The rank, the error when there is another number of ranks than the plan's, and a lot more."""
    text = "loaded"
    try:
        shardwright.load(model, plan)
    except DistributedError as error:
        text = str(error)
    return dist.get_rank(), text, bytes(2**20)
