"""Starts and ends ranks as processes: each rank's device, and the mesh over all ranks."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import DistributedError, PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication import facts
from shardwright.runtime.communication.mesh import Mesh, forget_meshes
from shardwright.runtime.ranks import rendezvous
from shardwright.runtime.ranks.agreement import Facts, Numbers, agree, gather, tried
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
    rendezvous.forget()
    gc.collect()


def pick_device(device: torch.device | str | None) -> torch.device:
    """Return this rank's device: the one given, or else its own GPU, or else the CPU.

    Raises:
        UsageError: torch does not know the device, or has no GPU.
    """
    gpus = torch.cuda.is_available()
    try:
        chosen = torch.device(device or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise UsageError(f"torch has no device {device!r}: give 'cpu' or 'cuda'") from None
    if chosen.type == "cuda":
        if not gpus:
            raise UsageError(f"torch finds no GPU, and device is {str(device)!r}: give 'cpu'")
        if chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    return chosen


class Unplanned(NamedTuple):
    """A plan that does not exist yet.

    Attributes:
        mesh: mesh dims and their ranks, which it is to be for.
        make: makes it.
    """

    mesh: Mapping[str, int]
    make: Callable[[], Plan]


class Ready(NamedTuple):
    """What a rank has done before it meets the others.

    Attributes:
        result: The result.
        facts: What must be equal on all ranks, beside the plan.
        numbers: Numbers that must be equal on all ranks, but for rounding.
    """

    result: Any = None
    facts: Facts = {}
    numbers: Numbers = {}


def meet(
    plan: Plan | Unplanned,
    mesh: DeviceMesh | Mesh | None,
    device: torch.device | None,
    timeout: float = 600.0,
    what: str = "starting",
    prepare: Callable[[Plan], Ready] = lambda _: Ready(),
) -> tuple[Plan, Mesh, Any]:
    """Return the plan that all ranks have, the mesh over its dims, and what `prepare` did.

    Every rank calls this. Ranks compare all that they were given in one exchange, which costs more
    than most of `prepare` does; one more makes a plan that does not exist yet.

    Args:
        plan: the plan, the same on each rank; or what the first rank makes one with.
        mesh: the caller's; made if there is none.
        device: where this rank computes; by default where `pick_device` says.
        timeout: seconds until all ranks must be there, and for each collective of groups that are
            made here.
        what: what the ranks do, for messages: "loading".
        prepare: what this rank does with the plan, without others; the others hear if it fails.

    Raises:
        Exception: that of `prepare`.
        CheckpointError: `prepare` failed with one on another rank.
        DistributedError: the process is not under torchrun, the number of ranks is not the plan's,
            a rank has another plan, or a rank failed, died or did not come.
        PlanError: `mesh` has other dims than the plan.
    """
    end_in_order()
    failure: Exception | None = None
    groups, ready = None, None
    if mesh is None:
        failure = start(plan.mesh, pick_device(device), timeout)
    else:
        mesh = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
        groups = groups_of(plan.mesh, mesh)
    if isinstance(plan, Unplanned):
        agree("starting", failure, {"plan": f"none, for {dict(plan.mesh)}"}, groups)
        plan = _made(plan, [rendezvous.world()] if groups is None else groups)
    given: Plan = plan
    if failure is None:
        ready, failure = tried(lambda: prepare(given))
    ready = ready or Ready()
    agree(what, failure, {"plan": facts.of_plan(given), **ready.facts}, groups, ready.numbers)
    return given, mesh or new_mesh(given, pick_device(device), timeout), ready.result


def _made(plan: Unplanned, groups: Sequence[dist.ProcessGroup]) -> Plan:
    """Let the first rank make the plan, and return it on all ranks."""
    text, failure = None, None
    if all(dist.get_rank(group) == 0 for group in groups):
        text, failure = tried(lambda: plan.make().to_json())
    agree("planning", failure, groups=groups)
    for group in groups:  # ranks that got it in one group pass it on in the next
        text = next(filter(None, gather("planning", text, group, str | None)), None)
    assert text is not None
    return Plan.from_json(text)


def groups_of(dims: Mapping[str, int], mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return the groups of a plan's mesh dims.

    Raises:
        PlanError: the mesh has others.
    """
    for name, size in dims.items():
        have = mesh.coords.get(name, (0, 0))[1]
        if have != size:
            raise PlanError(
                f"the plan is for {size} ranks on mesh dim '{name}', the mesh has {have}"
            )
    return mesh.process_groups(dims)


def start(dims: Mapping[str, int], device: torch.device, timeout: float) -> DistributedError | None:
    """Form the process group of all ranks, if there is none yet.

    Args:
        dims: a plan's mesh dims: how many ranks there should be.
        device: where this rank computes.
        timeout: seconds until all ranks must be there, and for each collective afterwards.

    Returns:
        An error if the number of ranks is wrong. The caller lets the ranks agree on it.

    Raises:
        DistributedError: the process is not under torchrun, or a rank died or did not come.
    """
    need = prod(dims.values())
    if not dist.is_initialized():
        _form("nccl" if device.type == "cuda" else "gloo", need, timeout)
    have = dist.get_world_size()
    if have == need:
        return None
    return DistributedError(
        f"the plan is for {need} ranks, but {have} are running: "
        f"start {need}, or plan with --tp {have}"
    )


def new_mesh(plan: Plan, device: torch.device, timeout: float) -> Mesh:
    """Make a mesh over all ranks with the plan's dims, after the ranks have agreed on the plan.

    Raises:
        DistributedError: a rank died.
    """
    names = tuple(plan.mesh)
    if len(names) == 1 and (ours := rendezvous.world()) is not dist.group.WORLD:
        return Mesh.from_device_mesh(
            DeviceMesh.from_group(ours, device.type, mesh_dim_names=names)  # pyright: ignore[reportArgumentType] names are str
        )
    own: dict[str, Any] | None = None  # a single mesh dim uses the default group and its timeout
    if len(names) > 1:
        kind: Any = type(rendezvous.world()._get_backend(device).options)
        options = kind()
        options._timeout = timedelta(seconds=timeout)
        own = dict.fromkeys(names, (dist.get_backend(), options))
    with noting_sockets():
        try:
            made = init_device_mesh(
                device.type,
                tuple(plan.mesh.values()),
                mesh_dim_names=names,
                backend_override=own,  # pyright: ignore[reportArgumentType] names are str
            )
        except RuntimeError as error:
            raise failed("starting", error, None) from error
    return Mesh.from_device_mesh(made)


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
