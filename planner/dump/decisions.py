"""What was tried, under which restrictions, and what came of it, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.graph.axes import leaves_of
from shardwright.planner.problem.pins import as_table
from shardwright.planner.search.record import Attempted
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.state import Shards


def decisions_text(
    task: Task,
    attempts: Sequence[Attempted],
    conflicts: Sequence[Conflict],
    names: Mapping[int, str],
) -> Iterator[str]:
    """Each step of the search in turn, then what dry runs failed at.

    Args:
        task: What was planned.
        attempts: The steps, in order.
        conflicts: What dry runs failed at.
        names: Axis id -> its name.
    """
    yield "# the steps of the search (planner/search/ladder.py), and what came of each"
    for number, step in enumerate(attempts, 1):
        yield f"{number}. {step.what}"
        for name, placement in as_table(step.restrictions.pins).items():
            yield f"   pinned      {name}={placement}"
        for tensor, shards in sorted(step.restrictions.forbidden, key=str):
            yield f"   forbidden   {tensor}: {_over(task, tensor, shards, names)}"
        for tensor in sorted(step.restrictions.gathered):
            yield f"   gathered    {tensor}, as it is read"
        if step.restrictions.conventions:
            yield f"   conventions {', '.join(sorted(step.restrictions.conventions))}"
        yield f"   -> {step.outcome}"
        if step.figures:
            yield f"      {', '.join(f'{name} {n:,}' for name, n in step.figures.items())}"
    yield ""
    yield "# what dry runs failed at: these shardings were forbidden"
    for conflict in conflicts:
        yield f"in '{conflict.module}': {conflict.text}"
        for tensor, shards in sorted(conflict.splits, key=str):
            yield f"   {tensor}: {_over(task, tensor, shards, names)}"


def _over(task: Task, tensor: str, shards: Shards, names: Mapping[int, str]) -> str:
    """Axes by name, with the dim that they are sharded in."""
    known = {a.id: names[a.id] for d in task.axes.dims[tensor] for a in leaves_of(d)}
    return ", ".join(f"dim {d} by {known.get(a, a)}" for d, a, _ in sorted(shards))
