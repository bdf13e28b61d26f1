"""Measure a device profile on the machine this runs on: one process for each rank, under torchrun.

A collective's latency and speed are the straight line through its times for several sizes that has
the least sum of squares; of relative errors, since a small collective matters as much as a large
one. Each time is the least of several runs, of the slowest rank.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.planner.device import SECOND, Device, Flops, Link, Links, sent

HOW = "run it under torchrun: torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json"
SIZES = tuple(2**n for n in range(12, 27, 2))
"""Bytes that enter a collective on one rank."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Effort:
    """How much is measured: the largest collective, sides of matrices, and bytes copied."""

    largest: int
    side: int
    copied: int
    runs: int = 7


def effort(device: torch.device, quick: bool) -> Effort:
    """What a device can do in a few seconds; `quick` for less than that."""
    if quick:
        return Effort(2**18, 128, 2**22, 2)
    if device.type == "cuda":
        return Effort(2**26, 8192, 2**30, 20)
    return Effort(2**24, 1024, 2**28)


def start() -> torch.device:
    """Join the ranks that torchrun started; the device of this one.

    Raises:
        UsageError: torchrun did not start this.
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
    """How many times `tick` is called by `measure`."""
    return len(KINDS) * len(_sizes(much)) + len(DTYPES) + 1


def measure(device: torch.device, much: Effort, tick: Callable[[], None]) -> Device:
    """The profile of the ranks of the process group; all ranks call it, and all get the same.

    Args:
        device: Of this rank.
        much: How much to measure.
        tick: Called after each step.
    """
    links = {kind: _link(kind, device, much, tick) for kind in KINDS}
    flops = {}
    for dtype in DTYPES:
        flops[str(dtype).removeprefix("torch.")] = _flops(dtype, device, much)
        tick()
    speed = _bandwidth(device, much)
    tick()
    return Device(
        source=source(device),
        memory_bytes=_shared_least(_memory(device)),
        memory_bytes_per_s=speed,
        flops_per_s=Flops(**flops),
        links=Links(**links),
    )


def fit(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The latency and the time a byte of the line nearest to (bytes, nanoseconds), both at least 0.

    Nearest by the squares of relative errors: each point weighs 1 / its time squared.
    """
    w = [1 / max(t, 1) ** 2 for _, t in points]
    n = sum(w)
    x = sum(a * s for a, (s, _) in zip(w, points, strict=True)) / n
    y = sum(a * t for a, (_, t) in zip(w, points, strict=True)) / n
    up = sum(a * (s - x) * (t - y) for a, (s, t) in zip(w, points, strict=True))
    across = sum(a * (s - x) ** 2 for a, (s, _) in zip(w, points, strict=True))
    slope = max(up / across, 0.0) if across else 0.0
    if y - slope * x >= 0:
        return y - slope * x, slope
    square = sum(a * s * s for a, (s, _) in zip(w, points, strict=True))
    return 0.0, sum(a * s * t for a, (s, t) in zip(w, points, strict=True)) / square


def source(device: torch.device) -> str:
    """Where the figures come from, in words."""
    ranks, name = dist.get_world_size(), platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{name} with {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"
    return f"measured by `shardwright calibrate` on {ranks} ranks: {name}; {dist.get_backend()}"


def _sizes(much: Effort) -> list[int]:
    return [n for n in SIZES if n <= much.largest]


def _link(kind: str, device: torch.device, much: Effort, tick: Callable[[], None]) -> Link:
    ranks, points = dist.get_world_size(), []
    for size in _sizes(much):
        points.append((size, _seconds(_collective(kind, size, device), device, much.runs)))
        tick()
    latency, slope = fit([(s, round(t * SECOND)) for s, t in points])
    moved = sent(kind, SECOND, ranks) / ranks / SECOND  # bytes sent for one that enters
    speed = moved / max(slope, 1e-6) * SECOND
    return Link(latency_ns=round(latency), bytes_per_s=max(round(speed), 1))


def _collective(kind: str, size: int, device: torch.device) -> Callable[[], object]:
    """One call of a collective that `size` bytes enter on each rank."""
    ranks = dist.get_world_size()
    elements = -(-size // 4 // ranks) * ranks
    given = torch.ones(elements, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(given)
    if kind == "all_gather":
        made = torch.empty(elements * ranks, device=device)
        return lambda: dist.all_gather_into_tensor(made, given)
    part = torch.empty(elements // ranks, device=device)
    return lambda: dist.reduce_scatter_tensor(part, given)


def _flops(dtype: torch.dtype, device: torch.device, much: Effort) -> int:
    """Operations a second in a product of square matrices; all ranks compute at once."""
    side = much.side
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds = _seconds(lambda: a @ b, device, much.runs)
    return max(round(2 * side**3 / seconds), 1)


def _bandwidth(device: torch.device, much: Effort) -> int:
    """Bytes a second that are read and written in a copy."""
    a = torch.ones(much.copied // 4, device=device)
    b = torch.empty_like(a)
    return round(2 * a.nbytes / _seconds(lambda: b.copy_(a), device, much.runs))


def _memory(device: torch.device) -> int:
    """Bytes of memory for each rank of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return have // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _seconds(call: Callable[[], object], device: torch.device, runs: int) -> float:
    """The least time of a call, of the rank that takes longest."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    least = float("inf")
    for _ in range(runs):
        dist.barrier()
        begin = time.perf_counter()
        call()
        wait()
        least = min(least, time.perf_counter() - begin)
    slowest = torch.tensor([least], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(slowest.item(), 1e-9)


def _shared_least(value: int) -> int:
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return min(found)
