"""Tasks side by side, each but the first in a forked process: it has all that this one has.

But not where another thread than the main one solves: a fork has the locks that others hold.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from shardwright.errors import SolverError

T = TypeVar("T")


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return, in their order.

    Raises:
        SolverError: a process ended without a result.
    """
    if threading.current_thread() is not threading.main_thread():
        return [task() for task in tasks]
    context = multiprocessing.get_context("fork")
    running: list[tuple[Any, Connection]] = []
    for task in tasks[1:]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(there, task), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    out = [task() for task in tasks[:1]]
    for process, here in running:
        try:
            out.append(here.recv())
        except EOFError:
            raise SolverError("a process of the solver ended without a result") from None
        process.join()
    return out


def _run(there: Connection, task: Callable[[], Any]) -> None:
    there.send(task())
    there.close()
