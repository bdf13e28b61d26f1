"""Ranks as processes: the group they make, the device each has, and failing together."""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import re
import time
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import CheckpointError, DistributedError, ShardwrightError
from shardwright.planner.contract.plan_file import Plan


@cache
def end_in_order() -> None:
    """When this process ends, end its process groups before Python takes its objects apart.

    Groups of gloo have threads. One that lives on in a cycle of references, or that nobody has
    ended, may be freed while these still run: then the process aborts after all went well
    ("terminate called without an active exception"; seen in every other run of three ranks).
    """
    atexit.register(_end)


def _end() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


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
    end_in_order()
    if mesh is not None:
        return mesh
    need = plan.world_size
    if not dist.is_initialized():
        if "RANK" not in os.environ and need > 1:
            raise DistributedError(
                f"the plan needs {need} ranks and this is a single process: "
                f"start it with `torchrun --nproc-per-node {need} ...`"
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=wait)
        else:  # a plan for one rank needs no launcher
            alone = dist.HashStore()
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=wait)
    have = dist.get_world_size()
    if have != need:
        raise DistributedError(
            f"the plan is for {need} ranks, but {have} are running: "
            f"start {need}, or plan with --tp {have}"
        )
    return init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))


def tell(failure: Exception | None, what: str) -> None:
    """Let all ranks know whether any failed; without a process group there is but this one.

    Args:
        failure: that of this rank.
        what: what was done, for the message: "saving".

    Raises:
        Exception: `failure` itself where there is one.
        CheckpointError: another rank failed with one, in the same words.
        DistributedError: another rank failed otherwise, or died.
    """
    if dist.is_available() and dist.is_initialized():
        mine = None if failure is None else (isinstance(failure, CheckpointError), str(failure))
        everyone: list[tuple[bool, str] | None] = [mine] * dist.get_world_size()
        try:
            dist.all_gather_object(everyone, mine)
        except RuntimeError as error:
            raise failure or lost(what, error, dist.group.WORLD) from error
        for rank, other in enumerate(everyone if failure is None else ()):
            if other is not None:
                kind = CheckpointError if other[0] else DistributedError
                raise kind(f"{what} failed on rank {rank}: {other[1]}")
    if failure is not None:
        raise failure


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
        raise lost("loading", error, dist.group.WORLD) from error
    if failure is not None:
        raise failure
    for rank, (digest, text) in enumerate(everyone):
        if text is not None:
            raise DistributedError(f"rank {rank} failed: {text}")
        if digest != mine[0]:
            raise DistributedError(f"rank {rank} holds another plan than rank {dist.get_rank()}")


ANSWER_SECONDS = 3.0
"""How long the ranks that notice a failure wait for each other's answer."""


def lost(what: str, error: RuntimeError, pg: dist.ProcessGroup | None) -> DistributedError:
    """An error for a collective that failed, naming the ranks of `pg` that no longer answer.

    Each rank that comes here says so in the store of the process group; a rank that died does not.
    """
    text = (str(error).strip() or "no message").splitlines()[0]
    # gloo begins with its source line and ends with good wishes
    text = re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0]
    silent = _silent(pg)
    if silent:
        ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
        return DistributedError(
            f"{what} failed on rank {dist.get_rank()}: no answer from {ranks}, which died or hangs "
            f"({text}): look at the output of {ranks}"
        )
    return DistributedError(f"{what} failed on rank {dist.get_rank()}: {text}")


def _silent(pg: dist.ProcessGroup | None) -> list[int]:
    """Ranks of `pg` that do not come here too."""
    me = dist.get_rank()
    ranks = dist.get_process_group_ranks(pg)  # pyright: ignore[reportArgumentType] None is the world
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"shardwright/failed/{me}", "")
        waiting, deadline = [r for r in ranks if r != me], time.monotonic() + ANSWER_SECONDS
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = [r for r in waiting if not store.check([f"shardwright/failed/{r}"])]
        return waiting
    except RuntimeError:  # the store died with the rank that keeps it: the first
        return [0] if me else []
