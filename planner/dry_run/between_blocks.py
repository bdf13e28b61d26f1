"""What the code around a stack does between two of its blocks, told by the kinds of the two.

Blocks are folded where they are alike; what is done between them must be, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.planner.blocks.stacks import Stack
from shardwright.planner.trace.trial.call_log import RUNS, Call, Calls

Between = tuple[str, int, tuple[Call, ...], int]
"""A stack, the kind of one block, what is called until the next, and the kind of that."""


def between_blocks(calls: Calls, stacks: Sequence[Stack]) -> set[Between]:
    """All that is done between two blocks of a stack, as `calls` of a model tell it."""
    return {found for made in calls.values() for stack in stacks for found in _between(made, stack)}


def _between(calls: Sequence[Call], stack: Stack) -> Iterator[Between]:
    before: int | None = None
    since: list[Call] = []
    for call in calls:
        kind = _kind(call, stack)
        if kind is None:
            since.append(call)
            continue
        if before is not None:
            yield stack.path, before, tuple(since), kind
        before, since = kind, []


def _kind(call: Call, stack: Stack) -> int | None:
    """The kind of the block that a call runs, if it is one."""
    if call.function != RUNS:
        return None
    path, _, number = str(call.numbers[0]).rpartition(".")
    return stack.kinds[int(number)] if path == stack.path else None
