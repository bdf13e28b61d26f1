"""Signals that end a process, as exceptions: what it has started is ended with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a process at once, unless it has its own way with them."""


class Ended(BaseException):
    """A signal that asks this process to end."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let a signal that would end this process at once run `finally` blocks inside first.

    The process then ends by that signal, as if nothing had caught it. Signals that come meanwhile
    are dropped, and those that the caller handles are left to the caller. In a thread other than
    the main one nothing is changed: Python hands signals to that alone.
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
