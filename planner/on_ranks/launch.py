"""Ranks as processes of this machine, talking over gloo; when one dies, so do the rest.

Started by spawn, so that no rank inherits threads or locks of the process that plans. None of them
outlives that process, however it ends, and no file is made that it could leave behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shardwright.errors import DistributedError, ShardwrightError
from shardwright.planner.on_ranks.signals import ended_in_order

HOST = "127.0.0.1"

GRACE = 5.0
"""Seconds that the others have to report, once a rank has failed: the first to notice a death is
not the one that died."""


def run_processes(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` on each of `ranks` processes that form a gloo group; the results by rank.

    `fn`, `args` and the results must pickle.

    Raises:
        ShardwrightError: what a rank raised.
        DistributedError: a rank died or raised something else; its traceback is on stderr.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    work = pickle.dumps((fn, args))
    with ended_in_order():
        try:
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_main, args=(theirs, rank, ranks, store.port, work), daemon=True
                )
                processes.append(process)
                process.start()
                theirs.close()  # so that a death shows as the end of what can be read
                pipes[mine] = rank
            return _collect(processes, pipes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(processes: list[BaseProcess], pipes: dict[Connection, int]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, ShardwrightError] = {}
    died: dict[int, DistributedError] = {}
    deadline: float | None = None
    while pipes and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        for pipe in wait(list(pipes), left):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                died[rank] = DistributedError(f"rank {rank} died ({end_in_words(processes[rank])})")
            else:
                (results if ok else failures)[rank] = value
            if rank not in results and deadline is None:
                deadline = time.monotonic() + GRACE
    causes = {r: e for r, e in failures.items() if not isinstance(e, DistributedError)}
    if died:  # the first of them: others may have died of it
        raise next(iter(died.values()))
    for found in (causes, failures):  # the cause before what it led to
        if found:
            raise found[min(found)]
    return [results[rank] for rank in range(len(processes))]


def _end_with_parent() -> None:
    """End this rank when the process that started it has ended, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def end_in_words(process: BaseProcess) -> str:
    """How a process ended."""
    code = process.exitcode or 0
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, out of memory?" if name == "SIGKILL" else name


def _main(
    pipe: Connection,
    rank: int,
    ranks: int,
    port: int,
    work: bytes,
) -> None:
    """What a rank runs; `work` is pickled, so that what it imports comes after the first line."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the parent ends its ranks
    import torch
    import torch.distributed as dist

    from shardwright.planner.quiet import quiet

    if sys.platform == "linux":  # a host name that leads nowhere must not stop local ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        with quiet():
            dist.init_process_group(
                "gloo",
                store=dist.TCPStore(HOST, port, wait_for_workers=False),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(minutes=30),
            )
            dist.barrier()  # a rank that ends at once would cut off one that still connects
            fn, args = pickle.loads(work)
            pipe.send((True, fn(*args)))
            dist.destroy_process_group()
    except ShardwrightError as error:
        pipe.send((False, error))
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip() or "no message").splitlines()[0]
        kind = DistributedError if "gloo/transport" in text else ShardwrightError
        pipe.send((False, kind(f"rank {rank} failed: {type(error).__name__}: {text}")))
