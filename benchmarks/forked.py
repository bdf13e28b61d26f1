"""Runs ranks as forks of a process that has imported torch: a tenth of a second each, not five.

Each rank writes to its own file. The results tell how it ended: well, with one of our errors, with
a raw exception, by a signal, or not at all.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from benchmarks.demo_launch import free_port

HOST = "127.0.0.1"


def agent_store() -> TCPStore:
    """Return a store that this process keeps for ranks, also over several starts of them."""
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


PRELOADED = ["torch", "transformers", "transformers.models.llama.modeling_llama", "shardwright"]
PRELOADED += ["shardwright.runtime.api", "shardwright.planner.api", "torch._dynamo"]


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        how: "well", "error" (one of ours), "raw", "killed" or "hangs".
        text: The message of an error.
        log: Everything that it wrote to stdout and stderr.
        seconds: Upper bound of the time until the last rank had ended.
    """

    how: str
    text: str
    log: str
    seconds: float


def run_forked(
    ranks: int,
    fn: Callable[..., None],
    args: Sequence[Any],
    folder: Path,
    *,
    limit: float = 90.0,
    environ: Sequence[dict[str, str]] = (),
    doomed: int | None = None,
    agent: TCPStore | None = None,
) -> list[Ended]:
    """Run `fn(*args)` on `ranks` processes with the environment that torchrun sets.

    Args:
        ranks: Number of ranks.
        fn: An importable function, as each process finds it by name.
        args: Arguments that pickle.
        folder: Folder for the ranks' files.
        limit: Seconds after which a rank counts as hanging and is killed.
        environ: Additions to the environment, by rank.
        agent: A store such as torchrun's agent keeps; by default rank 0 keeps the store.
        doomed: A rank that does not end by itself; it is killed when the others have ended.
    """
    context = fork_server(fn.__module__)
    port = free_port() if agent is None else agent.port
    processes, begun = [], time.monotonic()
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        own |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"TORCHELASTIC_USE_AGENT_STORE": str(agent is not None)}
        own |= environ[rank] if environ else {}
        process = context.Process(target=_main, args=(folder / f"rank-{rank}", own, fn, args))
        process.start()
        processes.append(process)
    ends: dict[int, Ended] = {}
    for rank in sorted(range(ranks), key=lambda rank: rank == doomed):
        process = processes[rank]
        process.join(0.0 if rank == doomed else max(limit - (time.monotonic() - begun), 0.0))
        seconds = time.monotonic() - begun
        if hangs := process.is_alive():
            process.kill()
            process.join()
        ends[rank] = _ended(folder / f"rank-{rank}", hangs, process.exitcode or 0, seconds)
    return [ends[rank] for rank in range(ranks)]


@cache
def fork_server(module: str) -> ForkServerContext:
    """Return the server that forks, once it is ready: its imports take long on a busy machine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, module])
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    return context


def _nothing() -> None:
    pass


def _ended(stem: Path, hangs: bool, code: int, seconds: float) -> Ended:
    log, report = stem.with_suffix(".log"), stem.with_suffix(".error")
    how = "hangs" if hangs else {0: "well", 3: "error"}.get(code, "killed" if code == -9 else "raw")
    return Ended(
        how,
        report.read_text() if report.exists() else "",
        log.read_text(errors="replace") if log.exists() else "",
        seconds,
    )


def _main(
    stem: Path, environ: dict[str, str], fn: Callable[..., None], args: Sequence[Any]
) -> None:
    """Run a fork."""
    gc.freeze()  # what was imported: each full collection would go through all of it
    log = os.open(stem.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environ)
    import torch

    from shardwright import ShardwrightError

    torch.set_num_threads(1)
    stem.with_suffix(".error").unlink(missing_ok=True)
    code = 0
    try:
        fn(*args)
    except ShardwrightError as error:
        stem.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        code = 3
    except BaseException:
        traceback.print_exc()
        code = 4
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
