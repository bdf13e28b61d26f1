"""Ranks as processes: the group they make, the device each has, and failing together."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import DistributedError, ShardwrightError
from shardwright.planner.plan_file import Plan


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device that this rank computes on: the one asked for, else its own GPU, else the CPU."""
    if device is not None:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    elif torch.cuda.is_available():
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def device_mesh_for(
    plan: Plan, mesh: DeviceMesh | None, device: torch.device, timeout: float
) -> DeviceMesh:
    """The caller's mesh, or a new one over all ranks with the plan's dims.

    Raises:
        DistributedError: not under torchrun, or another number of ranks than the plan needs.
    """
    if mesh is not None:
        return mesh
    need = plan.world_size
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise DistributedError(
                f"the plan needs {need} ranks and this is a single process: "
                f"start it with `torchrun --nproc-per-node {need} ...`"
            )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout)
        )
    have = dist.get_world_size()
    if have != need:
        raise DistributedError(
            f"the plan is for {need} ranks, but {have} are running: "
            f"start {need}, or plan with --tp {have}"
        )
    return init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))


def agree(plan: Plan, failure: ShardwrightError | None) -> None:
    """Let all ranks know whether any failed and whether they hold the same plan.

    Raises:
        ShardwrightError: this rank's own failure, or that of another rank.
    """
    mine = (hashlib.sha256(plan.to_json().encode()).hexdigest(), str(failure) if failure else None)
    everyone: list[tuple[str, str | None]] = [mine] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine)
    except RuntimeError as error:
        raise DistributedError(
            f"another rank died while loading: {str(error).splitlines()[0]}"
        ) from error
    if failure is not None:
        raise failure
    for rank, (digest, text) in enumerate(everyone):
        if text is not None:
            raise DistributedError(f"rank {rank} failed: {text}")
        if digest != mine[0]:
            raise DistributedError(f"rank {rank} holds another plan than rank {dist.get_rank()}")
