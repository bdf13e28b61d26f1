"""What only a GPU can tell of a split model; a rank of it, under torchrun (see `gpu.sh`).

    torchrun --nproc-per-node 8 -m benchmarks.gpu --device cuda --json FILE

exact       a small model in float64: difference of logits and gradients from the unsharded model
step        one decoded token, for the unsharded model and ours, eager and as one compiled graph:
            kernels launched, host time until all are queued, time until they are done
graph       difference of the logits of replayed graphs, with their collectives, from eager ones
train       peak memory of a training step
all_reduce  microseconds by bytes, for the backend and for torch's symmetric memory

A failure is noted in place of its figure. On CPUs kernels and memory are 0, and symmetric memory
fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import speed_models, speed_rank

LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
LAUNCHES |= {"cudaGraphLaunch"}
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes of an all-reduce."""
STEPS = 20
CLOSE = 1e-9


def main() -> int:
    """Measure; rank 0 shows and writes what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to try the script")
    parser.add_argument("--compiled", action="store_true", help="also steps of compiled models")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("shardwright").setLevel(
        logging.INFO
    )  # tells whether ranks share memory, or why not
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as own:
        job = speed_rank.Job("ours", rank, ranks, 0, own, "", "tiny", given.device, "float64")
        figures: dict[str, Any] = {"ranks": ranks, "device": given.device}
        here = speed_rank.Rank(job)
        if not dist.is_initialized():  # with one rank, no group was made
            dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
        _prepare(here, rank, "tiny", "float64")
        figures["exact"] = tried(lambda: exact(here))
        figures["graph"] = tried(lambda: replayed(here))
        size, dtype = ("tiny", "float32") if given.tiny else ("large", "bfloat16")
        _prepare(here, rank, size, dtype)
        figures["train"] = tried(lambda: peaks(here))
        for way in ("one", "ours"):
            figures[f"step, {way}"] = tried(lambda w=way: steps(here, w, compiles=False))
            if given.compiled:
                compiled = tried(lambda w=way: steps(here, w, compiles=True))
                figures[f"step, {way}, compiled"] = compiled
        figures["all_reduce"] = {n: reduces(here.device, n) for n in SIZES}
        dist.barrier()
    if rank == 0:
        text = json.dumps(figures, indent=1) + "\n"
        print(text)
        if given.json:
            given.json.write_text(text)
    dist.destroy_process_group()
    return int(not isinstance(figures["exact"], float) or figures["exact"] > CLOSE)


def tried(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or how it failed, in one line."""
    try:
        return work()
    except Exception as error:
        return (
            f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]:.200}"
        )


def _prepare(here: speed_rank.Rank, rank: int, size: str, dtype: str) -> None:
    """Give `here` models of this size: rank 0 makes a checkpoint and a plan for it."""
    from shardwright import plan

    folder = Path(here.job.folder) / size
    ranks = dist.get_world_size()
    if rank == 0:
        speed_models.make("dense", size, folder, getattr(torch, dtype), here.job.device)
        plan(folder, tp=ranks, objective="memory", phase="prefill,decode,train").save(
            folder / "plan.json"
        )
    where: list[Any] = [str(folder)]
    dist.broadcast_object_list(where, 0, device=here.device)
    here.job = here.job._replace(
        folder=where[0], plan=f"{where[0]}/plan.json", size=size, dtype=dtype
    )
    here.tokens = speed_rank.TOKENS[size]


def _hold(here: speed_rank.Rank, way: str) -> Any:
    here.model = here.fast = None
    here.model = speed_rank.LOADERS[way](here)
    return here.model


def exact(here: speed_rank.Rank) -> float:
    """Return the largest difference of logits and gradients from the unsharded model's."""
    from shardwright.runtime.state.gather import full_tensors

    ids = torch.arange(24, device=here.device).view(2, -1) % 251
    found = []
    for way in ("one", "ours"):
        model = _hold(here, way)
        out = model(ids)
        out.logits.pow(2).mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        whole = full_tensors(model, grads) if way == "ours" else grads
        found.append({"": out.logits.detach(), **whole})
    return max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0])


@torch.no_grad()
def replayed(here: speed_rank.Rank) -> float:
    """Return the largest difference of three tokens' logits, with the first run before capture."""
    from transformers import StaticCache

    model = _hold(here, "ours")
    ids = torch.arange(24, device=here.device).view(2, -1) % 251
    cache = StaticCache(model.config, 32)
    token = ids[:, :1].clone()

    def begin() -> None:
        cache.reset()
        model(ids, past_key_values=cache)

    def step() -> torch.Tensor:
        return model(token, past_key_values=cache).logits

    begin()
    expected = [(token.fill_(i), step().clone())[1] for i in range(3)]
    begin()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        found = [(token.fill_(0), step().clone())[1]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for i in (1, 2):
        token.fill_(i)
        graph.replay()
        found.append(logits.clone())
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


def peaks(here: speed_rank.Rank) -> dict[str, int]:
    """Return this rank's peak memory in a training step, in MiB."""
    out = {}
    for way in ("one", "ours"):
        _hold(here, way)
        if here.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        here.work("train")()
        out[way] = torch.cuda.max_memory_allocated() >> 20 if here.job.device == "cuda" else 0
    return out


def steps(here: speed_rank.Rank, way: str, compiles: bool) -> dict[str, float]:
    """Measure one decoded token."""
    _hold(here, way)
    here.compiles = compiles
    try:
        work = here.work("decode")
        for _ in range(3):
            work()
        _settle(here)
        begun = time.perf_counter()
        for _ in range(STEPS // 2):
            work()
        queued = time.perf_counter() - begun
        _settle(here)
        done = time.perf_counter() - begun
        launched = launches(here.device, work)
    finally:
        here.compiles = False
    per = 1e3 / (STEPS // 2)
    return {"kernels": launched, "host ms": round(queued * per, 3), "ms": round(done * per, 3)}


def launches(device: torch.device, work: Callable[[], Any]) -> int:
    """Return how many kernels `work` launches."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=activities) as seen:
        work()
        _wait(device)
    return sum(e.count for e in seen.key_averages() if e.key in LAUNCHES)


def reduces(device: torch.device, size: int) -> dict[str, Any]:
    """Return microseconds of an all-reduce of `size` bytes in bfloat16, for each way."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    want = float(dist.get_world_size())

    def timed(reduce: Callable[[], torch.Tensor]) -> float:
        if not bool((reduce() == want).all()):
            raise ValueError("the sum is wrong")
        begun = 0.0
        for turn in range(2 * STEPS):
            if turn == STEPS:
                _wait(device)
                begun = time.perf_counter()
            reduce()
        _wait(device)
        return round((time.perf_counter() - begun) / STEPS * 1e6, 1)

    def backend() -> torch.Tensor:
        x.fill_(1)
        dist.all_reduce(x)
        return x

    def in_shared(name: str) -> Callable[[], float]:
        def work() -> float:
            if device.type != "cuda":
                raise RuntimeError("symmetric memory is for GPUs")
            mine = symmetric.empty(size // 2, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(mine, group)
            op = getattr(torch.ops.symm_mem, name)
            return timed(lambda: op(mine.fill_(1), "sum", group.group_name))

        return work

    named = {n: in_shared(n) for n in ("one_shot_all_reduce", "two_shot_all_reduce_")}
    return {"backend": tried(lambda: timed(backend)), **{n: tried(w) for n, w in named.items()}}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _settle(here: speed_rank.Rank) -> None:
    _wait(here.device)


if __name__ == "__main__":
    sys.exit(main())
