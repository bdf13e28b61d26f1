"""Writes the planner's decisions as text: search steps, axes, states of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.axes import Axes, Dim, atoms_of, find, leaves_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import as_table
from shardwright.planner.problem.readable_names import dim_text
from shardwright.planner.search.search_state import Attempt
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.obstacles import place
from shardwright.planner.strategies.state import Shards
from shardwright.planner.strategies.states import States
from shardwright.planner.templates import rendered

FOLDER = Path(__file__).parent
"""The folder of the templates."""


def decisions_text(
    task: Task, attempts: Sequence[Attempt], conflicts: Sequence[Conflict], names: Mapping[int, str]
) -> str:
    """Return the steps of the search, then why dry runs failed.

    Args:
        task: The planning task.
        attempts: The steps, in order.
        conflicts: Failures of dry runs.
        names: Axis id -> its name.
    """

    def listed(tensor: str, shards: Shards) -> str:
        """List sharded axes by name, each with its dim."""
        known = {a.id: names[a.id] for d in task.axes.dims[tensor] for a in leaves_of(d)}
        return ", ".join(f"dim {d} by {known.get(a, a)}" for d, a, _ in sorted(shards))

    def figures(step: Attempt) -> str:
        return ", ".join(f"{name} {n:,}" for name, n in step.figures.items())

    return rendered(
        FOLDER, "decisions.txt", steps=attempts, conflicts=conflicts, listed=listed,
        figures=figures, as_table=as_table,
    )  # fmt: skip


def axes_text(graph: Graph, axes: Axes, states: States, names: Mapping[int, str]) -> str:
    """Return axes and conflicts, the rule of each op, and the dims of each tensor."""
    of_parameters = [a for u in graph.uses for dim in axes.dims[u.stored] for a in atoms_of(dim)]
    atoms = {a.id: a for a in of_parameters}.values()
    by_mask = states.allowed.items()
    over = {a.id: [states.sub.text(mask) for mask, ids in by_mask if a.id in ids] for a in atoms}
    rules = [(op.name, axes.rules.get(op.name)) for op in graph.ops]

    def as_axes(dims: Sequence[Dim]) -> tuple[str, bool]:
        """Return dims as axes, and whether a size is known only at run time."""
        return ", ".join(dim_text(d, names) for d in dims), any(find(d).unshardable for d in dims)

    return rendered(
        FOLDER, "axes.txt", names=names, place=place, axes=axes,
        atoms=[(atom, over[atom.id]) for atom in atoms],
        rules=[
            (name, rule, " ".join(f"{x}={n}" for x, n in rule.sizes.items()) if rule else "")
            for name, rule in rules
        ],
        tensors=[(name, *as_axes(axes.dims[name])) for name in graph.tensors],
    )  # fmt: skip


def states_text(
    graph: Graph, states: States, chosen: Layouts | None, names: Mapping[int, str]
) -> str:
    """Return every tensor with its states, by number; `*` marks the chosen state.

    Args:
        graph: The traced model.
        states: The domains of its tensors.
        chosen: The solution, if there is one.
        names: Axis id -> its name.
    """
    layouts = chosen or Layouts(graph, states, {})

    def domain(name: str) -> Iterator[tuple[bool, str, str, bool]]:
        """Yield whether a state is the chosen one, its placement, its axes, and if it is shared."""
        state = chosen.assignment[name] if chosen else None
        axes = {a.id: names[a.id] for d in states.axes.dims[name] for a in leaves_of(d)}
        for each in states.domain(name):
            parts = ((axes.get(a, a), states.sub.text(m)) for _, a, m in sorted(each.shards))
            over = ", ".join(f"{axis} over {ranks}" for axis, ranks in parts)
            yield each == state, str(layouts.placement(name, each, True)), over, each.shared

    tensors = [(name, graph.representative(name), domain(name)) for name in graph.tensors]
    return rendered(FOLDER, "states.txt", tensors=tensors)
