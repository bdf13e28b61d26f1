"""Branches on data of which both sides go on: the run is traced once for each side.

A plan must hold for both traces, as for all runs. All ranks read the same value, so all of them
take the same branch. If a run has more than `MAX_QUESTIONS` such branches, the module that
branches is treated as data-dependent. A loop of one module that may end after each pass has up to
`MAX_IN_CHAIN`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardwright.planner.trace.data_queries.errors import AsksLess, BranchesOnData
from shardwright.runtime.scopes import holding

Answers = tuple[bool, ...]
BranchPaths = tuple[tuple[int, Answers], ...]
"""For each traced call: (number of the run, answers to the first questions that it asks)."""

MAX_QUESTIONS, MAX_IN_CHAIN = 2, 12
"""The most questions of a run that are answered both ways. `MAX_IN_CHAIN` holds where a module asks
all of them, and goes on to the next after one answer alone."""

_present: ContextVar[tuple[int, Iterator[bool], dict[str, bool]]] = ContextVar("present")
"""The current traced call: its number, the remaining answers, and answers that hold all through it.
"""


def both(
    paths: BranchPaths,
    traced_call: int,
    alike: Collection[int] = (),
    chain: bool = False,
    ahead: bool = False,
) -> BranchPaths | None:
    """Return `paths` with one more question of a traced call answered both ways.

    Returns None if the call has too many answers already. `chain` says whether one module asked all
    questions. Later calls with the same answers of the runs `alike` are taken to ask the same, and
    with `ahead` a chain of two to ask as many as it may; `fewer` takes it back.
    """
    run, answers = paths[traced_call]
    chain = chain and len({*answers}) == 1
    if len(answers) >= (most := MAX_IN_CHAIN if chain else MAX_QUESTIONS):
        return None
    goes_on = chain and answers[0]
    more = most - len(answers) if chain and ahead and len(answers) > 1 else 1
    tails = [(goes_on,) * n + (not goes_on,) for n in range(more)] + [(goes_on,) * more]
    same = {traced_call, *(i for i, (r, a) in enumerate(paths) if r in alike and a == answers)}
    found: list[tuple[int, Answers]] = []
    for i, (r, a) in enumerate(paths):
        ends = sorted(tails) if i in same and i >= traced_call else ((),)
        found += [(r, (*a, *end)) for end in ends]
    return tuple(found)


def fewer(paths: BranchPaths, traced_call: int, asked: int) -> BranchPaths:
    """Return `paths` with no more answers of a traced call than it asked questions."""
    run, answers = paths[traced_call]
    kept = run, answers[:asked]
    found = ((r, a) if (r, a[: len(kept[1])]) != kept else kept for r, a in paths)
    return tuple(dict.fromkeys(found))


@contextmanager
def taken(traced_call: int, answers: Answers, all_asked: bool = True) -> Iterator[None]:
    """Context manager for traced call number `traced_call`: its first questions get these answers.

    Raises:
        AsksLess: with `all_asked`, fewer questions were asked than there are answers: an
            earlier run changed something.
    """
    with holding(_present, (traced_call, rest := iter(answers), {})):
        yield
    if all_asked and (left := len([*rest])):
        raise AsksLess(traced_call, len(answers) - left)


def answer() -> tuple[int, bool | None]:
    """Return the number of the traced call, and the answer to its next question or None."""
    traced_call, rest, _ = _present.get()
    return traced_call, next(rest, None)


def answer_for_all(question: str) -> bool | None:
    """Return the answer to a question that has one answer per call; None outside of calls.

    Raises:
        BranchesOnData: the question has no answer yet.
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
