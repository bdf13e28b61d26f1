"""Model code that goes on either way from what it asks of data: it is run both ways.

A run that asks such a question is made twice, once with each answer, and a plan must hold for both,
as for all runs. All ranks read the same, so all go the same way. Code that asks more than a few
such questions depends on data as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardwright.planner.trace.data_queries.errors import BranchesOnData

Answers = tuple[bool, ...]
BranchPaths = tuple[tuple[int, Answers], ...]
"""(number of a run that is asked for, answers to the first questions that it asks), traced call by
traced call."""

MOST = 2
"""Questions of a run that are answered both ways."""

_present: ContextVar[tuple[int, Iterator[bool], dict[str, bool]]] = ContextVar("present")
"""The traced call that is made now: its number, the answers that are left, and those that hold for
all of the call."""


def both(paths: BranchPaths, traced_call: int) -> BranchPaths | None:
    """`paths` where a traced call answers one question more, both ways; None if that is many."""
    run, answers = paths[traced_call]
    if len(answers) >= MOST:
        return None
    more = ((run, (*answers, False)), (run, (*answers, True)))
    return (*paths[:traced_call], *more, *paths[traced_call + 1 :])


@contextmanager
def taken(traced_call: int, answers: Answers, all_asked: bool = True) -> Iterator[None]:
    """Within, which is traced call number `traced_call`, the first questions have these answers.

    Raises:
        RuntimeError: fewer are asked, though it should be all: what was run before has changed
            something.
    """
    token = _present.set((traced_call, rest := iter(answers), {}))
    try:
        yield
    finally:
        _present.reset(token)
    if all_asked and next(rest, None) is not None:
        raise RuntimeError("code that depends on data does otherwise when it is run again")


def answer() -> tuple[int, bool | None]:
    """The number of the traced call, and the answer to its next question if it has one."""
    traced_call, rest, _ = _present.get()
    return traced_call, next(rest, None)


def answer_for_all(question: str) -> bool | None:
    """The answer to a question that has the same one all through a call; None outside of calls.

    Raises:
        BranchesOnData: it has none yet.
    """
    if (present := _present.get(None)) is None:
        return None
    traced_call, rest, known = present
    if question not in known:
        found = next(rest, None)
        if found is None:
            raise BranchesOnData(traced_call)
        known[question] = found
    return known[question]
