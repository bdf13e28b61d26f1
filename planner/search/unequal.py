"""Plans for ranks that differ: those that can hold or do more get larger parts.

Parts are first in the ratio of speeds, which takes least time. If a rank cannot hold its part, they
are in the ratio of what is left of the ranks' memories when each holds what no rank can split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.ladder import Tell, search
from shardwright.planner.search.search_state import SearchState
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.units import human_bytes

TRIES = 4
"""How often parts are changed because a rank holds too much: rounding moves a unit or two."""
CLOSE, STEPS = 1e-4, 1000
"""How far a ratio of whole numbers may be off, and the largest that the least of them becomes."""

Sharing = Callable[[Sequence[int] | None], Task]
"""Returns the task in which the ranks of tp hold parts in a ratio; empty if these are equal.

None is the ratio that the model was read with.
"""


def search_shares(
    task: Task, sharing: Sharing, asked: SolverOptions, tell: Tell | None = None
) -> SearchState:
    """Search a plan, and if ranks of tp differ, the parts that they hold.

    Args:
        task: The task with equal parts. Its workload has the speeds and memories of the ranks.
        sharing: The tasks with other parts.
        asked: How to search. If ranks have memories, they are the limit.
        tell: As for `search`.

    Raises:
        InfeasibleError: the ranks cannot hold the model, however it is shared out.
        ModelError, SolverError: as `search`.
    """
    limits, by_speed = task.workload.memories, _ratio(task.workload.speeds)
    limited = replace(asked, memory=min(limits)) if limits else asked
    found = search(sharing(by_speed) if by_speed else task, limited, tell)
    unlike = _ratio(limits) or by_speed
    if not limits or not unlike or not _over(found, limits):
        return found
    free = replace(asked, objective="memory", memory=None)
    whole, split = _whole_and_split(search(sharing(unlike), free, tell).plan, unlike)
    room = [limit - whole for limit in limits]
    for _ in range(TRIES):
        if min(room) <= 0 or sum(room) < split:
            break
        found = search(sharing(_ratio(room)), limited, tell)
        over = _over(found, limits)
        if not over:
            return found
        room = [have - over.get(rank, 0) for rank, have in enumerate(room)]
    each = ", ".join(map(human_bytes, limits))
    raise InfeasibleError(
        f"no plan fits ranks that may hold {each}: each holds {human_bytes(whole)} that is not "
        f"split, and all together {human_bytes(split)} that is"
    )


def _ratio(values: Sequence[float]) -> tuple[int, ...]:
    """Return small whole numbers in about the ratio of some values; empty if these are equal."""
    if len({*values}) < 2:
        return ()
    exact, numbers = [value / min(values) for value in values], tuple[int, ...]()
    for least in range(1, STEPS + 1):
        numbers = tuple(round(value * least) for value in exact)
        if all(abs(n / least / v - 1) <= CLOSE for n, v in zip(numbers, exact, strict=True)):
            break
    return numbers


def _over(found: SearchState, limits: Sequence[int]) -> dict[int, int]:
    """Return the ranks that hold too much with the plan of a search, and how much too much.

    Raises:
        InfeasibleError: there is no plan, for another reason.
    """
    error = found.outcome
    if isinstance(error, OverMemory):
        return {limits.index(min(limits)): error.least - error.budget}
    held = held_by_ranks(found.plan, len(limits))
    pairs = zip(held, limits, strict=True)
    return {rank: have - limit for rank, (have, limit) in enumerate(pairs) if have > limit}


def held_by_ranks(plan: Plan, ranks: int) -> list[int]:
    """Return the bytes that each rank of tp holds."""
    predicted = plan.predicted
    assert predicted.memory is not None, "new predictions have it"
    return predicted.memory_by_rank or [predicted.memory.total] * ranks


def _whole_and_split(plan: Plan, parts: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that each rank holds whole, and those that all share out in `parts`.

    They follow from what the rank with most and the rank with least hold.
    """
    held = held_by_ranks(plan, len(parts))
    most, least = max(parts), min(parts)
    between = held[parts.index(most)] - held[parts.index(least)]
    split = between * sum(parts) // (most - least)
    return held[parts.index(least)] - split * least // sum(parts), split
