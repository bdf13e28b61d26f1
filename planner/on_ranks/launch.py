"""Starts ranks as processes of this machine; if one dies, the rest are ended.

They are spawned, so that no rank inherits threads or locks of the planning process. They meet in a
file that only this user can reach, and listen on the loopback device only. No rank outlives the
process that started it, however that process ends, and the last one to end removes the file.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from shardwright.errors import DistributedError, ShardwrightError, UsageError, in_one_line

GRACE = 5.0
"""Seconds that the other ranks have to report after one has failed: the first rank that notices a
death is not the one that died."""

RANK = "rank {}"
"""The name of a rank's process."""

START = 120.0
"""Seconds until all ranks must be connected."""


def run_processes(
    ranks: int, fn: Callable[..., Any], *args: Any, on_gpus: bool = False
) -> list[Any]:
    """Run `fn(*args)` on each of `ranks` processes in a group; return the results by rank.

    `fn`, `args` and the results must pickle. The processes are named `RANK` with their number.

    Args:
        ranks: The number of processes.
        fn: What each runs.
        args: Its arguments.
        on_gpus: Whether each rank has a GPU of this machine. They are then connected by NCCL, else
            by gloo.

    Raises:
        ShardwrightError: a rank raised an error; tracebacks of other exceptions are on stderr.
        DistributedError: a rank died, or lost its connection to another rank.
        UsageError: a rank imports the user's script, which gets here again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "ranks import this script for the classes in it, and it starts ranks again: put what "
            'it does under `if __name__ == "__main__":`'
        )
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    work = pickle.dumps((fn, args))
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        try:
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_main,
                    args=(theirs, rank, ranks, folder, work, on_gpus),
                    name=RANK.format(rank),
                    daemon=True,
                )
                processes.append(process)
                with nullcontext() if b"__main__" in work else _without_script():
                    process.start()
                theirs.close()  # so that a dead rank shows as the end of the pipe
                pipes[mine] = rank
            return _collect(processes, pipes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


@contextmanager
def _without_script() -> Iterator[None]:
    """Inside, processes that are started do not run the user's script, as spawned ones do.

    A script without `if __name__ == "__main__":` would get here again in each of them.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


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
    if died:  # raise the first: the others may have died because of it
        raise next(iter(died.values()))
    for found in (causes, failures):  # causes before their consequences
        if found:
            raise found[min(found)]
    return [results[rank] for rank in range(len(processes))]


def _end_with_parent(folder: str) -> None:
    """End this rank when the process that started it has ended, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def end_in_words(process: BaseProcess) -> str:
    """Describe how a process ended."""
    code = process.exitcode or 0
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, out of memory?" if name == "SIGKILL" else name


def _main(pipe: Connection, rank: int, ranks: int, folder: str, work: bytes, on_gpus: bool) -> None:
    """Run a rank. `work` is pickled, so that its imports come after the first line."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on an interrupt the parent ends its ranks
    import torch
    import torch.distributed as dist

    from shardwright.planner.quiet import quiet

    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # no other machine can reach it
            os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        with quiet():
            _connect(rank, ranks, folder, "cpu:gloo,cuda:nccl" if on_gpus else "gloo")
            fn, args = pickle.loads(work)
            pipe.send((True, fn(*args)))
            dist.destroy_process_group()
    except ShardwrightError as error:
        pipe.send((False, error))
    except BaseException as error:
        text = in_one_line(error)
        cut_off = "gloo/transport" in text  # the rank at the other end tells why
        if not cut_off:
            traceback.print_exc()
        kind = DistributedError if cut_off else ShardwrightError
        pipe.send((False, kind(f"rank {rank} failed: {text}")))


def _connect(rank: int, ranks: int, folder: str, backend: str) -> None:
    """Form the process group of the ranks, who meet in `folder`.

    Raises:
        DistributedError: they do not get through to each other.
    """
    import torch.distributed as dist

    from shardwright.runtime.ranks.failure import short

    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/store", ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=START),
        )
        dist.barrier()  # a rank that ended now would cut off ranks that still connect
    except (RuntimeError, ValueError) as error:  # a stranger's bytes may be no number
        raise DistributedError(
            f"rank {rank} of {ranks} could not connect to the others ({short(error)}): try again; "
            "another program of this machine may have sent something to its port"
        ) from error
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    dist.group.WORLD.set_timeout(timedelta(minutes=30))


ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a process at once by default."""


class Ended(BaseException):
    """A signal asks this process to end."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let signals that would end this process at once run the `finally` blocks inside first.

    The process then ends by that signal, as if nothing had caught it. Further signals meanwhile are
    dropped, and signals with a handler of the caller's are left alone. Outside the main thread
    nothing changes, since Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [s for s in ENDING if signal.getsignal(s) is signal.SIG_DFL]
    came: list[int] = []

    def end(number: int, _: Any) -> None:
        came.append(number)
        if len(came) == 1:
            raise Ended

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])
