"""Compares predicted with measured memory and compute time of a rank, on GPUs that ranks may share.

    torchrun --nproc-per-node 2 -m benchmarks.gpu_predicted --json FILE

memory   the most bytes that a rank held in a pass, with all its collectives
compute  a pass of the first rank without collectives; the other ranks wait meanwhile. It is run as
         Python launches it, and as a captured graph. It is predicted for a device whose collectives
         take no time.

Prints a row for each model and pass, and the rank correlation (Spearman) of the times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwright
from benchmarks import speed_models
from benchmarks.gpu import launches, tried
from benchmarks.prediction import spearman
from benchmarks.speed_rank import stubbed
from benchmarks.zoo_ranks import shared_gpu
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import device as profile_of

REPEAT = 10


class Pass(NamedTuple):
    """A pass that is planned and measured: sequences, tokens of each, and its phase."""

    phase: str
    batch: int
    seq: int


PASSES = [
    Pass("prefill", 1, 2048),
    Pass("prefill", 8, 512),
    Pass("decode", 1, 2048),
    Pass("decode", 32, 512),
    Pass("train", 4, 512),
]
TINY = [each._replace(batch=2, seq=32) for each in PASSES if each.batch < 8]


def main() -> None:
    """Measure; the first rank shows and writes what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--profile", default="h100-nvlink")
    parser.add_argument("--models", default="dense,fused,mixture")
    parser.add_argument("--size", default="large")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = shared_gpu(rank, ranks) if given.device == "cuda" else torch.device("cpu")
    if given.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    waiting: Any = dist.new_group(backend="gloo")  # ranks that wait in it leave the GPU alone
    passes = TINY if given.size == "tiny" else PASSES
    rows = []
    with tempfile.TemporaryDirectory() as own:
        for name in given.models.split(","):
            folder = _made(name, given, passes, Path(own), waiting)
            for i, one in enumerate(passes):
                row = measured(folder, f"{folder}/{i}.json", one, device, waiting)
                rows.append({"model": name, "tp": ranks, **one._asdict(), **row})
                if rank == 0:
                    print(json.dumps(rows[-1]), flush=True)
    if rank == 0:
        told = {"ranks": ranks, "size": given.size, "profile": given.profile, "rows": rows}
        for key in ("eager ms", "graph ms"):
            both = [(r["predicted ms"], r[key]) for r in rows if isinstance(r.get(key), float)]
            pairs = [*zip(*both, strict=True)]
            told[key] = spearman(*pairs) if len(both) > 2 else None
        print({k: v for k, v in told.items() if k != "rows"})
        if given.json:
            given.json.write_text(json.dumps(told, indent=1) + "\n")
    dist.barrier(waiting)
    dist.destroy_process_group()


def _made(name: str, given: Any, passes: list[Pass], own: Path, waiting: Any) -> str:
    """Let the first rank write a checkpoint, and a plan for each pass; return the folder."""
    folder = [str(own / name)]
    if dist.get_rank() == 0:
        speed_models.make(name, given.size, Path(folder[0]), torch.bfloat16, given.device)
        profile = profile_of(given.profile).model_dump()
        for link in profile["links"].values():
            link |= {"latency_ns": 0, "bytes_per_s": 10**15}
        free = Path(folder[0]) / "free.json"
        free.write_text(json.dumps(profile))
        for i, one in enumerate(passes):
            made = shardwright.plan(
                folder[0], dist.get_world_size(), phase=one.phase, batch=one.batch, seq=one.seq,
                device=str(free), objective="memory", dtype="bfloat16",
            )  # fmt: skip
            made.save(Path(folder[0]) / f"{i}.json")
    dist.broadcast_object_list(folder, group=waiting)
    return folder[0]


def measured(
    folder: str, file: str, one: Pass, device: torch.device, waiting: Any
) -> dict[str, Any]:
    """Return one pass's predicted and measured figures. All ranks call this."""
    plan = Plan.load(file)
    gc.collect()  # the last model, whose modules hold each other
    begun = time.perf_counter()
    model: Any = shardwright.load(folder, plan, device=device, timeout=300.0)
    dist.barrier(waiting)
    seconds = time.perf_counter() - begun
    model.train(one.phase == "train")
    work = _work(model, one, device)
    work()
    held = _peak(device, work)
    held_by_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held_by_all, held, group=waiting)
    assert plan.predicted.memory is not None
    row: dict[str, Any] = {
        "load s": round(seconds, 1),
        "predicted MiB": round(plan.predicted.memory.total / 2**20),
        "measured MiB": round(max(held_by_all) / 2**20),
        "parts MiB": {k: round(v / 2**20) for k, v in plan.predicted.memory},
        "predicted ms": sum(plan.predicted.phase_ns.values()) / 1e6,
    }
    if dist.get_rank() == 0:
        with stubbed():
            row["kernels"] = launches(device, work)
            row["eager ms"] = tried(lambda: _milliseconds(device, work))
            if one.phase != "train":
                captured = partial(_captured, model, one, device)
                row["graph ms"] = tried(lambda: _milliseconds(device, captured()))
    dist.barrier(waiting)
    return row


def _work(model: Any, one: Pass, device: torch.device, static: bool = False) -> Callable[[], Any]:
    """Return a function that does the pass once."""
    from transformers import DynamicCache, StaticCache

    ids = torch.arange(one.batch * one.seq, device=device).view(one.batch, -1) % 251
    if one.phase == "train":

        def train() -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        return train
    keeps: dict[str, Any] = {"logits_to_keep": 1}
    if one.phase == "prefill":
        return torch.no_grad()(lambda: model(ids, use_cache=True, **keeps))
    room = one.seq + 8 * REPEAT
    cache: Any = StaticCache(model.config, room) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, **keeps)
    return torch.no_grad()(lambda: model(ids[:, -1:], past_key_values=cache, **keeps))


def _captured(model: Any, one: Pass, device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        raise RuntimeError("graphs are for GPUs")
    work = _work(model, one, device, static=True)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _peak(device: torch.device, work: Callable[[], Any]) -> int:
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _milliseconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Return the median of several passes."""

    def turns() -> Iterator[float]:
        for turn in range(REPEAT + 2):
            begun = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                yield time.perf_counter() - begun

    return round(statistics.median(turns()) * 1e3, 4)


if __name__ == "__main__":
    main()
