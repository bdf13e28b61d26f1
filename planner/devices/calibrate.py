"""Measures a device profile on this machine, with one process per rank under torchrun.

Everything is measured as in a model: after a matrix product, which leaves the caches full of other
data, the ranks out of step and the backend's threads asleep; on tensors that were just made, with
results in new memory. The ranks meet only in the collectives. A rank that is ahead waits there, and
the wait counts as part of the collective, so that a rank's times add up to its forward pass. A
time is the mean over the ranks and the median over many turns. A plan adds up what its parts
usually take; the least times of all parts never occur together. Every turn measures everything
once, so that a machine that is slow for some seconds is slow for all.

On several hosts the links within a host are measured between its ranks, and the way out of a host
between the ranks with the same number on each host, all at once.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.devices.device import SECOND, Device, Flops, Hosts, Links
from shardwright.planner.devices.fit import link
from shardwright.runtime.communication.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from shardwright.runtime.communication.mesh import Group

HOW = "run it under torchrun: torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json"
SIZES = tuple(2**n for n in range(12, 27, 2))
"""Input bytes of a collective on one rank."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
BETWEEN = "between hosts"
SMALL = 64
"""Ops that do next to nothing, one after the other."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Effort:
    """How much is measured: the largest collective, the side of the matrices, and the turns."""

    largest: int
    side: int
    turns: int


def effort(device: torch.device, quick: bool) -> Effort:
    """Return what a device can measure in half a minute, or less with `quick`."""
    if quick:
        return Effort(2**18, 128, 2)
    return Effort(2**26, 8192, 20) if device.type == "cuda" else Effort(2**24, 1024, 60)


def start() -> torch.device:
    """Join the ranks that torchrun started, and return this rank's device.

    Raises:
        UsageError: the process was not started by torchrun, or there are fewer than 2 ranks.
    """
    if "RANK" not in os.environ:
        raise UsageError(f"calibrate measures what several ranks do together: {HOW}")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise UsageError("calibrate needs at least 2 ranks: torchrun --nproc-per-node 2 …")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def steps(much: Effort) -> int:
    """Return how many times `measure` calls `tick`."""
    return much.turns + 1


def measure(device: torch.device, much: Effort, tick: Callable[[], None]) -> Device:
    """Measure the profile of the ranks. All ranks must call this, and all get the same result.

    Args:
        device: This rank's device.
        much: How much to measure.
        tick: Called after each step.
    """
    groups = groups_by_level(dist.get_world_size(), local_ranks())
    within, between = (_join(each) for each in groups)
    near = within if within.size > 1 else between
    cases = _cases(device, much, near, between)
    times = dict(zip(cases, _seconds(list(cases.values()), device, much, tick), strict=True))
    flops = {
        dtype_name(dtype): round(2 * much.side**3 / times["product", dtype]) for dtype in DTYPES
    }
    moved = 2 * 4 * much.side**2
    return Device(
        source=source(device),
        memory_bytes=_shared_least(_memory(device)),
        memory_bytes_per_s=round(moved / times["copy", moved]),
        flops_per_s=Flops(**flops),
        kernel_ns=round(times["small", SMALL] / SMALL * SECOND),
        host_wait_ns=round(max(times["waits", SMALL] - times["small", SMALL], 0) / SMALL * SECOND),
        links=Links(**{kind: link(kind, _points(times, kind), near.size) for kind in KINDS}),
        hosts=_hosts(_points(times, BETWEEN), between.size) if between.size > 1 else None,
    )


def local_ranks() -> int:
    """Return the ranks on this host, as torchrun says; all if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def groups_by_level(world: int, local: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks within a host, and of one rank of each host.

    Raises:
        UsageError: the hosts have different numbers of ranks.
    """
    if world % local:
        raise UsageError(
            f"{world} ranks are not the same number on each host: start equally many on all"
        )
    within = [[*range(first, first + local)] for first in range(0, world, local)]
    return within, [[*range(first, world, local)] for first in range(local)]


def _join(groups: Sequence[Sequence[int]]) -> Group:
    """Make all these groups, on each rank, and return the one that this rank is in."""
    made: list[tuple[Sequence[int], Any]] = [(ranks, dist.new_group([*ranks])) for ranks in groups]
    return Group.of(next(group for ranks, group in made if dist.get_rank() in ranks))


def _points(times: Mapping[tuple[str, Any], float], kind: str) -> list[tuple[int, int]]:
    """Return (bytes, nanoseconds) of the cases of a kind."""
    return [(n, round(t * SECOND)) for (k, n), t in times.items() if k == kind]


def _hosts(points: Sequence[tuple[int, int]], hosts: int) -> Hosts:
    """Return the way out of a host, from all-reduces between hosts. gloo only makes rings."""
    found = link("all_reduce", points, hosts)
    levels = dist.get_backend() != "gloo"
    return Hosts(devices=local_ranks(), levels=levels, **found.model_dump())


def source(device: torch.device) -> str:
    """Describe where the figures come from."""
    ranks, name = dist.get_world_size(), platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{name} with {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"
    return f"measured by `shardwright calibrate` on {ranks} ranks: {name}; {dist.get_backend()}"


class Case(NamedTuple):
    """Something to measure: `call`, applied to the result of `given`."""

    given: Callable[[], Tensor]
    call: Callable[[Tensor], object]


def _cases(
    device: torch.device, much: Effort, group: Group, between: Group
) -> dict[tuple[str, Any], Case]:
    """Return what is measured: (kind, bytes) of collectives, products by dtype, a copy, small ops.

    Args:
        device: This rank's device.
        much: How much to measure.
        group: The ranks of collectives within a host; those between hosts if it has one rank.
        between: One rank of each host.
    """
    made = torch.ones(much.side, much.side, device=device)
    square = {dtype: made.to(dtype) for dtype in DTYPES}
    calls = {  # as the runtime runs them, without the copy that its all-reduce begins with
        "all_reduce": partial(all_reduce, group=group, spent=True),
        "all_gather": lambda x: all_gather(x, group),
        "reduce_scatter": lambda x: reduce_scatter(x, group),
        "all_to_all": lambda x: all_to_all(x, [1] * group.size, [1] * group.size, group),
    }

    def rows(size: int) -> Tensor:
        return torch.ones(group.size, -(-size // 4 // group.size), device=device)

    cases: dict[tuple[str, Any], Case] = {
        (kind, n): Case(partial(rows, n), calls[kind])
        for kind in KINDS
        for n in SIZES
        if n <= much.largest
    }
    if between.size > 1:
        out = partial(dist.all_reduce, group=between.pg)
        sizes = (n for n in SIZES if n <= much.largest)
        cases |= {(BETWEEN, n): Case(partial(rows, n), out) for n in sizes}
    for dtype, x in square.items():
        cases["product", dtype] = Case(x.clone, partial(torch.mm, mat2=x))
    cases["copy", 2 * made.nbytes] = Case(made.clone, torch.clone)
    for kind, waits in (("small", False), ("waits", True)):
        cases[kind, SMALL] = Case(lambda: made[0, :8].clone(), partial(_small_ops, waits=waits))
    return cases


def _small_ops(x: Tensor, waits: bool) -> None:
    for _ in range(SMALL):
        x = x + 1
        if waits:
            x[0].item()


def _memory(device: torch.device) -> int:
    """Return this machine's bytes of memory per rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return have // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _seconds(
    cases: Sequence[Case], device: torch.device, much: Effort, tick: Callable[[], None]
) -> list[float]:
    """Return the usual seconds of each case after a matrix product, measured in turns."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    a = torch.ones(much.side // 2, much.side, device=device)
    b = torch.ones(much.side, much.side, device=device)
    spent = torch.zeros(much.turns + 1, len(cases), dtype=torch.float64)
    for turn in range(much.turns + 1):  # the first warms up
        for at, case in enumerate(cases):
            made, x = a @ b, case.given()
            begun = now()
            result = case.call(x)
            spent[turn, at] = now() - begun
            del x, made, result
        tick()
    times = spent[1:].to(device)
    dist.all_reduce(times)
    return [max(t / dist.get_world_size(), 1e-9) for t in times.median(0).values.tolist()]


def _shared_least(value: int) -> int:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
