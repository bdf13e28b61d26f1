"""What may come of a fault, and how it is told: one line and no traceback, or the same numbers."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwright.errors import ShardwrightError

Outcome = Literal["equal", "refused", "wrong", "raw", "hang"]
BAD = ("wrong", "raw", "hang")


class Hang(BaseException):
    """It took too long; no `except Exception` of others stops this."""


class Wrong(Exception):
    """What was accepted is not what it should be."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Hang inside after so many seconds of processor time of this process (main thread)."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass
class Tally:
    """How often each outcome came, and the first cases of those that may not."""

    counts: Counter[str] = field(default_factory=Counter)
    cases: list[str] = field(default_factory=list)

    def note(self, what: str, outcome: Outcome, detail: str = "") -> None:
        """Count an outcome of the fault that `what` describes."""
        self.counts[outcome] += 1
        if outcome in BAD:
            self.cases.append(f"{outcome}: {what}\n{detail}")

    def take(self, what: str, seconds: float, attempt: Callable[[], Any]) -> None:
        """Make an attempt, and count what comes of it: `equal` where nothing is raised."""
        try:
            with within(seconds):
                attempt()
        except ShardwrightError as error:
            several = "\n" in str(error).strip() or not str(error).strip()
            self.note(what, "raw" if several else "refused", repr(str(error)))
        except Wrong as error:
            self.note(what, "wrong", str(error))
        except Hang:
            self.note(what, "hang")
        except Exception:  # the traceback is what a user would see
            self.note(what, "raw", traceback.format_exc(limit=-6))
        else:
            self.note(what, "equal")

    @property
    def ok(self) -> bool:
        """Whether nothing came that may not."""
        return not any(self.counts[bad] for bad in BAD)

    def __str__(self) -> str:
        names = ("equal", "refused", *BAD)
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)
