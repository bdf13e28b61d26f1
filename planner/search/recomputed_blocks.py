"""Blocks that keep only their inputs in training and are computed again: all, or as few as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil

from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.search_state import SearchState
from shardwright.planner.search.solution import Solution
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import unfolded


def recompute_all(now: SearchState) -> SearchState | None:
    """If no plan for training fits, drop the activations of all blocks and compute them again."""
    task = now.task
    if not isinstance(now.outcome, OverMemory) or task.recomputing is None:
        return None
    load = task.workload.model_copy(update={"recomputed": task.recomputable})
    every = replace(task, workload=load, recomputing=None)
    return replace(now.restart(every), without_recompute=now)


def least_time(now: SearchState) -> int | None:
    """Return the nanoseconds of a step if as few blocks as may fit are computed again.

    The placements stay. None if not all blocks are computed again.
    """
    found, kept = now.outcome, now.without_recompute
    if kept is None or kept.formulation is None or not isinstance(found, Solution):
        return None
    over, most = kept.outcome, sum(kept.task.recomputable.values())
    assert isinstance(over, OverMemory), "otherwise no block is computed again"
    there = unfolded(kept.task, found.layouts, kept.formulation.costs)
    saved = there.memory.total - found.unfolded.memory.total
    of_block = max(saved // max(most - 1, 1), 1)  # one block is held while it is computed again
    count = min(max(ceil((over.least - over.budget) / of_block), 1), most)
    before = there.bill.first_run.price.time
    return before + (found.time_ns - before) * count // most


def with_fewer(kept: SearchState, found: Sequence[Solution]) -> Iterator[Task]:
    """Yield tasks with fewer blocks computed again than all, each with one more than the last.

    Args:
        kept: The state in which nothing fits and no block is computed again.
        found: Solutions. The first task has as few blocks as fit with the placements of one.
    """
    blocks, recomputing = kept.task.recomputable, kept.task.recomputing
    assert isinstance(kept.outcome, OverMemory) and kept.formulation and recomputing
    budget, costs = kept.outcome.budget, kept.formulation.costs

    def over(solution: Solution, count: int) -> int:
        """Return the bytes over the budget with these placements."""
        recomputed = {"recomputed": _firsts(blocks, count)}
        task = replace(kept.task, workload=kept.task.workload.model_copy(update=recomputed))
        return unfolded(task, solution.layouts, costs).memory.total - budget

    most = sum(blocks.values())
    least = min(fewest(lambda count, each=each: over(each, count), most) for each in found)
    yield from (recomputing(_firsts(blocks, count)) for count in range(least, most))


def fewest(over: Callable[[int], int], most: int) -> int:
    """Return the least count from 1 that is not over; `most` if all below it are.

    `over` falls as the count grows, by about as much each time, so few counts are tried.
    """
    over, low, high = cache(over), 0, most
    while high - low > 1:
        step = max(over(low) - over(high), 1)
        guess = low + ceil(over(low) * (high - low) / step)
        count = min(max(guess, low + 1), high - 1)
        low, high = (low, count) if over(count) <= 0 else (count, high)
    return high


def _firsts(blocks: Mapping[str, int], count: int) -> dict[str, int]:
    """Return how many blocks of each list are computed again, if `count` are in all."""
    left, out = count, {}
    for path, most in blocks.items():
        if take := min(left, most):
            out[path] = take
        left -= take
    return out
