"""The refined axes as text: which there are, which tensors have them, what was in the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.planner.graph.axes import Axes, atoms_of, find
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.names import dim_text
from shardwright.planner.strategies.obstacles import place
from shardwright.planner.strategies.states import States


def axes_text(graph: Graph, axes: Axes, states: States, names: Mapping[int, str]) -> Iterator[str]:
    """Axes, then conflicts, then the dims of each tensor and the rule of each op."""
    yield "# axes of parameters: name, size, over which part of the mesh it may be sharded"
    shown: set[int] = set()
    for use in graph.uses:
        for dim in axes.dims[use.stored]:
            for atom in atoms_of(dim):
                if atom.id not in shown:
                    shown.add(atom.id)
                    yield f"{names[atom.id]}={atom.size}: {_over(atom.id, states)}"
    yield ""
    yield "# dims that the code takes apart in two ways: they stay replicated"
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


def _over(axis: int, states: States) -> str:
    found = [states.sub.text(mask) for mask, axes in states.allowed.items() if axis in axes]
    return "may be sharded over " + ", ".join(found) if found else "stays replicated"
