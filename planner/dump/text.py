"""Writes the planner's decisions as text: search steps, axes, states of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.axes import Axes, atoms_of, find, leaves_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import as_table
from shardwright.planner.problem.readable_names import dim_text
from shardwright.planner.search.search_state import Attempt
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.obstacles import place
from shardwright.planner.strategies.state import Shards
from shardwright.planner.strategies.states import States


def decisions_text(
    task: Task,
    attempts: Sequence[Attempt],
    conflicts: Sequence[Conflict],
    names: Mapping[int, str],
) -> Iterator[str]:
    """Yield the steps of the search, then why dry runs failed.

    Args:
        task: The planning task.
        attempts: The steps, in order.
        conflicts: Failures of dry runs.
        names: Axis id -> its name.
    """
    yield "# the steps of the search (planner/search/ladder.py), and what came of each"
    for number, step in enumerate(attempts, 1):
        yield f"{number}. {step.what}"
        for name, placement in as_table(step.restrictions.pins).items():
            yield f"   pinned      {name}={placement}"
        for tensor, shards in sorted(step.restrictions.forbidden, key=str):
            yield f"   forbidden   {tensor}: {_shards(task, tensor, shards, names)}"
        for tensor in sorted(step.restrictions.gathered):
            yield f"   gathered    {tensor}, as it is read"
        if step.restrictions.conventions:
            yield f"   conventions {', '.join(sorted(step.restrictions.conventions))}"
        yield f"   -> {step.outcome}"
        if step.figures:
            yield f"      {', '.join(f'{name} {n:,}' for name, n in step.figures.items())}"
    yield ""
    yield "# why dry runs failed: these shardings were forbidden"
    for conflict in conflicts:
        yield f"in '{conflict.module}': {conflict.text}"
        for tensor, shards in sorted(conflict.splits, key=str):
            yield f"   {tensor}: {_shards(task, tensor, shards, names)}"


def _shards(task: Task, tensor: str, shards: Shards, names: Mapping[int, str]) -> str:
    """List sharded axes by name, each with its dim."""
    known = {a.id: names[a.id] for d in task.axes.dims[tensor] for a in leaves_of(d)}
    return ", ".join(f"dim {d} by {known.get(a, a)}" for d, a, _ in sorted(shards))


def axes_text(graph: Graph, axes: Axes, states: States, names: Mapping[int, str]) -> Iterator[str]:
    """Yield axes and conflicts, the rule of each op, and the dims of each tensor."""
    yield "# axes of parameters: name, size, sub-axes of the mesh that may shard it"
    found = [a for u in graph.uses for dim in axes.dims[u.stored] for a in atoms_of(dim)]
    for atom in {a.id: a for a in found}.values():
        over = [states.sub.text(mask) for mask, ids in states.allowed.items() if atom.id in ids]
        text = f"may be sharded over {', '.join(over)}" if over else "stays replicated"
        yield f"{names[atom.id]}={atom.size}: {text}"
    yield ""
    yield "# dims that the code divides in two ways: they stay replicated"
    yield from (f"{place(op)}: {text}" for op, text in axes.conflicts)
    yield ""
    yield "# rules: op, rule with sizes bound; none: its tensors stay replicated"
    for op in graph.ops:
        rule = axes.rules.get(op.name)
        sizes = " ".join(f"{x}={n}" for x, n in rule.sizes.items()) if rule else ""
        yield f"{op.name}: {rule or 'no rule'}{f'   [{sizes}]' if sizes else ''}"
    yield ""
    yield "# tensors: dims, as axes"
    for name in graph.tensors:
        dims = ", ".join(dim_text(d, names) for d in axes.dims[name])
        open_ = any(find(d).unshardable for d in axes.dims[name])
        yield f"{name}: {dims or 'scalar'}{'   (with a size of run time)' if open_ else ''}"


def states_text(
    graph: Graph, states: States, chosen: Layouts | None, names: Mapping[int, str]
) -> Iterator[str]:
    """Yield every tensor with its states, by number; `*` marks the chosen state.

    Args:
        graph: The traced model.
        states: The domains of its tensors.
        chosen: The solution, if there is one.
        names: Axis id -> its name.
    """
    yield "# tensors: the states that each may have; * is what was chosen"
    layouts = chosen or Layouts(graph, states, {})
    for name in graph.tensors:
        one = graph.representative(name)
        yield f"{name}{f'   (as {one}: equal blocks share it)' if one != name else ''}"
        state = chosen.assignment[name] if chosen else None
        axes = {a.id: names[a.id] for d in states.axes.dims[name] for a in leaves_of(d)}
        for number, each in enumerate(states.domain(name)):
            over = ", ".join(
                f"{axes.get(a, a)} over {states.sub.text(m)}" for _, a, m in sorted(each.shards)
            )
            placement = str(layouts.placement(name, each, stored=True)) or "scalar"
            shared = "   shared out over copies" if each.shared else ""
            mark = "*" if each == state else " "
            yield f"  {mark} {number}: {placement}{f'   [{over}]' if over else ''}{shared}"
