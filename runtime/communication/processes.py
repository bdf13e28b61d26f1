"""Starts and ends ranks as processes: each rank's device, and the mesh over all ranks."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import DistributedError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication import facts
from shardwright.runtime.communication.mesh import forget_meshes
from shardwright.runtime.ranks import agreement, rendezvous
from shardwright.runtime.ranks.failure import failed, noting_sockets


@cache
def end_in_order() -> None:
    """Destroy process groups at exit, before Python destroys its objects.

    gloo groups have threads. A group that is kept by a reference cycle, or that nobody destroyed,
    may be freed while its threads still run. The process then aborts after all went well
    ("terminate called without an active exception"; seen in every other run of three ranks).
    """
    atexit.register(_end)


def _end() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    gc.collect()


def pick_device(device: torch.device | str | None) -> torch.device:
    """Return this rank's device: the one given, or else its own GPU, or else the CPU."""
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
    """Return the caller's mesh, or a new one over all ranks with the plan's dims.

    Args:
        plan: the plan, the same on each rank.
        mesh: the caller's.
        device: where this rank computes.
        timeout: seconds until all ranks must be there, and for each collective of groups that are
            made here.

    Raises:
        DistributedError: the process is not under torchrun, the number of ranks is not the plan's,
            a rank has another plan, or a rank died or did not come.
    """
    if mesh is not None:
        end_in_order()
        return mesh
    failure = start(plan, device, timeout)
    agreement.agree("starting", failure, {"plan": facts.of_plan(plan)})
    return new_mesh(plan, device, timeout)


def start(plan: Plan, device: torch.device, timeout: float) -> DistributedError | None:
    """Form the process group of all ranks, if there is none yet.

    Args:
        plan: says how many ranks there should be.
        device: where this rank computes.
        timeout: seconds until all ranks must be there, and for each collective afterwards.

    Returns:
        An error if the number of ranks is wrong. The caller lets the ranks agree on it.

    Raises:
        DistributedError: the process is not under torchrun, or a rank died or did not come.
    """
    end_in_order()
    if not dist.is_initialized():
        _form("nccl" if device.type == "cuda" else "gloo", plan.world_size, timeout)
    need, have = plan.world_size, dist.get_world_size()
    if have == need:
        return None
    return DistributedError(
        f"the plan is for {need} ranks, but {have} are running: "
        f"start {need}, or plan with --tp {have}"
    )


def new_mesh(plan: Plan, device: torch.device, timeout: float) -> DeviceMesh:
    """Make a mesh over all ranks with the plan's dims, after the ranks have agreed on the plan.

    Raises:
        DistributedError: a rank died.
    """
    names = tuple(plan.mesh)
    own: dict[str, Any] | None = None  # a single mesh dim uses the default group and its timeout
    if len(names) > 1:
        kind: Any = type(agreement.world()._get_backend(device).options)
        options = kind()
        options._timeout = timedelta(seconds=timeout)
        own = dict.fromkeys(names, (dist.get_backend(), options))
    with noting_sockets():
        try:
            return init_device_mesh(
                device.type,
                tuple(plan.mesh.values()),
                mesh_dim_names=names,
                backend_override=own,  # pyright: ignore[reportArgumentType] names are str
            )
        except RuntimeError as error:
            raise failed("starting", error, None) from error


def _form(backend: str, ranks: int, timeout: float) -> None:
    if "RANK" in os.environ:
        rendezvous.form(backend, timeout)
    elif ranks == 1:  # needs no launcher
        wait = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    else:
        raise DistributedError(
            f"the plan needs {ranks} ranks and this is a single process: "
            f"start it with `torchrun --nproc-per-node {ranks} ...`"
        )
