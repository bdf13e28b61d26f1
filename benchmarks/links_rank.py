"""A rank of `links.py`: times a step of each plan in a folder, in turn."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import shardwright
from benchmarks.links_models import BATCH, SEQ, config
from shardwright.planner.contract.plan_file import Plan


def split(name: str, plan: Plan) -> Any:
    """Return the model, split by a plan over all ranks."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(name)).eval()
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    model = shardwright.apply(model, plan, mesh)
    if plan.workload.dp == "fsdp":
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        for part in (*max(lists, key=len), model):
            fully_shard(part, mesh=mesh["dp"])
    return model


def step(model: Any, plan: Plan, ids: torch.Tensor) -> None:
    """Run a forward pass with the sequences of this copy, and a backward pass in training."""
    trains = "train" in plan.workload.phases
    copies = plan.workload.replicas
    copy = dist.get_rank() // (plan.world_size // copies)  # copies are the outer mesh dims
    own = ids.chunk(copies)[copy]
    model.train(trains)
    with torch.set_grad_enabled(trains):
        out = model(own, labels=own if trains else None, use_cache=False)
    if trains:
        out.loss.backward()
        model.zero_grad()


def main() -> None:
    """Time all plans; the first rank writes the seconds of each."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plans = [Plan.load(folder / f"{i}.json") for i in range(job["plans"])]
    models = [split(job["model"], plan) for plan in plans]
    ids = torch.randint(2048, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(job["repeat"] + 1):  # the first turn warms up
        for at in random.Random(turn).sample(range(len(models)), len(models)):
            dist.barrier()
            begun = time.perf_counter()
            step(models[at], plans[at], ids)
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                seconds[at].append(float(took))
    if dist.get_rank() == 0:
        medians = [statistics.median(each) for each in seconds]
        (folder / "seconds.json").write_text(json.dumps(medians))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
