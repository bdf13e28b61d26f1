"""A rank of `speed.py`: holds a model and runs commands."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TOKENS = {"full": {"prefill": 512, "decode": 64, "train": 256}}
TOKENS["tiny"] = {"prefill": 32, "decode": 8, "train": 16}
TOKENS["large"] = {"prefill": 2048, "decode": 64, "train": 1024}
STEPS = {"prefill": 1, "decode": 16, "train": 1}
"""How often a phase is run for one figure."""


class Job(NamedTuple):
    """What a rank is started with."""

    way: str
    rank: int
    ranks: int
    port: int
    folder: str
    plan: str
    size: str
    device: str
    dtype: str


def main(pipe: Connection, job: Job) -> None:
    """Answer commands (name, *arguments) until there are no more; errors are answers too."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.ranks),
    )
    rank: Rank | None = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            rank = rank or Rank(job)
            pipe.send((True, getattr(rank, command)(*arguments)))
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            pipe.send((False, f"{type(error).__name__}: {text[:160]}"))


class Rank:
    """A model on one rank."""

    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        import shardwright.runtime.api  # noqa: F401 imports are not loading
        from benchmarks.zoo_ranks import shared_gpu

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        self.job, self.torch = job, torch
        cuda = job.device == "cuda"
        self.device = shared_gpu(job.rank, job.ranks) if cuda else torch.device(job.device)
        if cuda:
            torch.cuda.set_device(self.device)
        if job.ranks > 1:
            torch.distributed.init_process_group("nccl" if cuda else "gloo")
        self.model: Any = None
        self.tokens = TOKENS[job.size]
        self.compiles = False
        self.fast: Any = None
        """The compiled model, and the cache of fixed size that it is compiled for."""

    def load(self) -> dict[str, float]:
        """Load the model again; return seconds and the growth of anonymous memory in bytes."""
        import gc

        from benchmarks.loading import memory

        self.model = self.fast = None
        gc.collect()
        self._together()
        before, begun = memory(), time.perf_counter()
        self.model = LOADERS[self.job.way](self)
        self._done()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "anonymous": memory() - before}

    def run(self, phase: str, variant: str) -> float:
        """Return the seconds of one run of a phase."""
        with VARIANTS[variant](self):
            work = self.work(phase)
            self._together()
            begun = time.perf_counter()
            for _ in range(STEPS[phase]):
                work()
            self._done()
            return (time.perf_counter() - begun) / STEPS[phase]

    def count(self, phase: str) -> dict[str, int]:
        """Return the counts of one run of a phase."""
        from benchmarks.speed_counts import counted

        work = self.work(phase)
        work()
        return counted(work, ours=self.job.way == "ours")

    def work(self, phase: str) -> Callable[[], Any]:
        """Return a function that runs a phase once; its preparation is done before."""
        torch, model = self.torch, self.model
        ids = torch.arange(self.tokens[phase], device=self.device).view(1, -1) % 251
        if phase == "train":

            def train() -> None:
                model(ids, labels=ids).loss.backward()
                model.zero_grad(set_to_none=True)

            return train
        if self.compiles:
            return self._compiled_step(ids)
        with torch.no_grad():
            cache = model(ids, logits_to_keep=1).past_key_values if phase == "decode" else None

        @torch.no_grad()
        def step() -> None:
            if cache is None:
                model(ids, logits_to_keep=1)
            else:
                model(ids[:, -1:], past_key_values=cache)

        return step

    def _compiled_step(self, ids: Any) -> Callable[[], Any]:
        """Return a decode step as one graph, with a cache of fixed size; compiled only once."""
        torch = self.torch
        if self.fast is None:
            from transformers import StaticCache

            room = ids.shape[1] + 2 * STEPS["decode"]
            mode = "reduce-overhead" if self.job.device == "cuda" else None
            fast = torch.compile(self.model, fullgraph=True, mode=mode)
            self.fast = fast, StaticCache(config=self.model.config, max_cache_len=room)
        fast, cache = self.fast
        cache.reset()

        @torch.no_grad()
        def step() -> None:
            fast(ids[:, -1:], past_key_values=cache)

        with torch.no_grad():
            self.model(ids, past_key_values=cache, logits_to_keep=1)
        for _ in range(3):  # compiles, and records what a GPU replays
            step()
        return step

    def _together(self) -> None:
        if self.job.ranks > 1:
            self.torch.distributed.barrier()

    def _done(self) -> None:
        if self.job.device == "cuda":
            self.torch.cuda.synchronize()


def _one(rank: Rank) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(rank.job.folder, dtype=rank.job.dtype)
    return loaded.to(rank.device).eval()


def _ours(rank: Rank) -> Any:
    import shardwright

    return shardwright.load(
        Path(rank.job.folder), rank.job.plan, device=rank.device, timeout=120.0
    ).eval()


def _peer(rank: Rank) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    wanted = DistributedConfig(tp_size=rank.job.ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        rank.job.folder, distributed_config=wanted, dtype=rank.job.dtype
    ).eval()


LOADERS: dict[str, Callable[[Rank], Any]] = {"one": _one, "ours": _ours, "transformers": _peer}


@contextmanager
def _all_cores(rank: Rank) -> Iterator[None]:
    rank.torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        rank.torch.set_num_threads(1)


@contextmanager
def stubbed(_: Rank | None = None) -> Iterator[None]:
    """Replace collectives by local results, so that no rank waits for another."""
    from shardwright.runtime.communication import collectives
    from shardwright.runtime.redistribution import overlap

    begun = mock.patch.object(overlap, "begin_all_reduce", lambda x, _: (x.clone(), lambda: None))
    with mock.patch.object(collectives, "_run", _alone), begun:
        yield


def _alone(group: Any, kind: str, x: Any, *_: Any, **__: Any) -> Any:
    if kind == "all_gather":
        return x.repeat(group.size)
    return x[: x.numel() // group.size].clone() if kind == "reduce_scatter" else x.clone()


@contextmanager
def _functional(_: Rank) -> Iterator[None]:
    """Replace all collectives by the backend's functional ones."""
    from shardwright.runtime.communication import collectives

    with mock.patch.object(collectives, "_run", collectives._traced):
        yield


@contextmanager
def _compiled(rank: Rank) -> Iterator[None]:
    rank.compiles = True
    try:
        yield
    finally:
        rank.compiles = False


VARIANTS: dict[str, Callable[[Rank], Any]] = {
    "": lambda _: nullcontext(),
    "all cores": _all_cores,
    "compiled": _compiled,
    "functional": _functional,
    "stubbed": stubbed,
}
