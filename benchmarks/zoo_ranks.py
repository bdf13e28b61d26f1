"""Processes that run one model after the other on their ranks, and are replaced when one fails."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from shardwright.runtime.communication.mesh import Mesh

Job = tuple[str, str]
"""A kind and a name."""
PATIENCE = 5
"""How many times its processor seconds a job may take by the clock."""

Case = Callable[[str, str, int, int, Mesh], dict[str, Any]]
"""(kind, name, rank, ranks, mesh) -> a row. All ranks call it; it must pickle."""


def sweep(
    jobs: Sequence[Job], tp: int, case: Case, groups: int, limit: float, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each job, in the order in which they end.

    Args:
        jobs: What to run.
        tp: Processes in a group.
        case: Called for each job.
        groups: How many groups work at once.
        limit: Processor seconds of a process for a job; a group that takes longer is ended. So is
            one that takes `PATIENCE` times as long by the clock: its processes may wait for each
            other.
        device: "cpu", or "cuda": then ranks may share a GPU.
    """
    pool, local, started = ThreadPoolExecutor(groups), threading.local(), []

    def run(job: Job) -> dict[str, Any]:
        group = getattr(local, "group", None)
        if group is None or not group.alive:
            group = local.group = _Group(tp, case, device, limit)
            started.append(group)
        return group.run(job)

    try:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for group in started:
            group.end()


class _Group:
    """A group of as many processes as there are ranks."""

    def __init__(self, tp: int, case: Case, device: str, limit: float) -> None:
        context, self.alive, self.limit = mp.get_context("spawn"), True, limit
        self.jobs = [context.Queue() for _ in range(tp)]
        self.results = context.Queue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ranks = [
            context.Process(
                target=_serve,
                args=(r, tp, port, case, self.jobs[r], self.results, device, limit),
                daemon=True,
            )
            for r in range(tp)
        ]
        for process in self.ranks:
            process.start()

    def run(self, job: Job) -> dict[str, Any]:
        """Return the row of a job; if that raises or takes too long, the group is dead."""
        for each in self.jobs:
            each.put(job)
        row = self._awaited()
        if isinstance(row, str):
            row = {"kind": job[0], "name": job[1], "raised": "", "error": row}
        if "raised" in row:
            self.end()
        return row

    def _awaited(self) -> dict[str, Any] | str:
        """Return the row that a rank sends, or why none comes."""
        until = time.monotonic() + PATIENCE * self.limit
        while time.monotonic() < until:
            with suppress(queue.Empty):
                return self.results.get(timeout=1)
            codes = [process.exitcode for process in self.ranks]
            if ended := [f"rank {r} ended with {code}" for r, code in enumerate(codes) if code]:
                return ", ".join(ended)
        return f"no result in {PATIENCE * self.limit:.0f} s"

    def end(self) -> None:
        """End all of its processes."""
        self.alive = False
        for process in self.ranks:
            process.kill()


def shared_gpu(rank: int, ranks: int) -> torch.device:
    """Return a rank's GPU; before NCCL starts, make it allow several ranks on one GPU."""
    found = torch.cuda.device_count()
    if ranks > found:
        os.environ["NCCL_HOSTID"] = str(rank)  # as if each rank had a host: it talks by sockets
    os.environ["LOCAL_RANK"] = str(rank % found)
    return torch.device("cuda", rank % found)


class _OutOfTime(BaseException):
    """A job took all the processor time that it may: no code of a model catches this."""


def _serve(
    rank: int, tp: int, port: int, case: Case, jobs: Any, results: Any, device: str, limit: float
) -> None:
    def stop(*_: Any) -> None:
        raise _OutOfTime(f"no result in {limit:.0f} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(shared_gpu(rank, tp))
        torch.backends.cudnn.allow_tf32 = False
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=tp, timeout=timedelta(minutes=20))
    mesh = Mesh.from_device_mesh(init_device_mesh(device, (tp,), mesh_dim_names=("tp",)))
    while True:
        kind, name = jobs.get()
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            row = case(kind, name, rank, tp, mesh)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except (Exception, _OutOfTime) as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            text = f"rank {rank}: {type(error).__name__}: {error} ({where})"
            row = {"kind": kind, "name": name, "error": text, "raised": traceback.format_exc()}
            results.put(row)
            return
        if rank == 0:
            results.put(row)
