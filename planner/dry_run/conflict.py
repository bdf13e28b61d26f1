"""Finds the splits to forbid after a failed dry run: those near the failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.dry_run.local_sizes import Unsolvable
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.state import Shards
from shardwright.planner.trace.sizes.expressions import Expression

Splits = frozenset[tuple[str, Shards]]


@dataclass(frozen=True)
class Conflict:
    """Splits that failed a dry run, with the error.

    `module` is the module that failed, if nothing more precise is known.
    """

    splits: Splits
    text: str
    module: str | None = None


def of_size(
    unsolvable: Unsolvable, layouts: Layouts, earlier: Sequence[Conflict] = ()
) -> Conflict | None:
    """Return the conflict at a size that no attributes give; None if nothing is sharded there.

    Failures of the same code, in similar modules, are forbidden together. Otherwise blocks that
    could not be folded would fail one after the other.
    """
    graph = layouts.graph
    producers = graph.producers()
    op = producers.get(unsolvable.size.tensor)
    near = _near_size(graph, layouts, unsolvable)
    if not near:
        return of_module(op.module if op else "", str(unsolvable), layouts, earlier)
    for more in unsolvable.more:
        if _code(producers, more) == _code(producers, unsolvable):
            near |= _near_size(graph, layouts, more)
    return Conflict(near, str(unsolvable))


def of_module(
    module: str, text: str, layouts: Layouts, earlier: Sequence[Conflict] = ()
) -> Conflict | None:
    """Return the conflict for the error `text` in `module`; None if nothing is sharded.

    If the local forward of a module fails, its splits are forbidden. If it fails again, all splits
    in it are forbidden. If it still fails, the enclosing module is next. So a search ends, at the
    latest with nothing sharded.
    """
    graph, states, assignment = layouts.graph, layouts.states, layouts.assignment
    if states.sequence and (along := _along(graph, layouts, module)):
        return Conflict(along, text)
    inside = (op for op in graph.ops if not module or is_within(op.module, module))
    names = {name for op in inside for name in (*op.inputs, *op.outputs)}
    if split := frozenset((n, assignment[n].shards) for n in names if assignment[n].shards):
        if any(conflict.module == module for conflict in earlier):
            split = frozenset((n, s) for n in names for s in states.splits(n))
        return Conflict(split, text, module)
    if gathered := _gathered(graph, layouts, names):
        return Conflict(gathered, text)
    return of_module(module.rpartition(".")[0], text, layouts, earlier) if module else None


def _along(graph: Graph, layouts: Layouts, module: str) -> Splits:
    """Return sequence splits of tensors that the own code of `module` and similar modules uses.

    Hidden states that must be sharded are left out.
    """
    sequence = layouts.states.sequence
    assert sequence is not None
    alike = (op for op in graph.ops if pattern(op.module) == pattern(module))
    names = {name for op in alike for name in (*op.inputs, *op.outputs)}
    found = {(n, layouts.assignment[n].shards) for n in names - sequence.handed.keys()}
    return frozenset((n, shards) for n, shards in found if sequence.splits(shards))


def _gathered(graph: Graph, layouts: Layouts, names: set[str]) -> Splits:
    """Return every split of the sharded weights that `names` use (as all-gathered)."""
    held = {u.stored for u in graph.uses if u.used in names}
    return frozenset(
        (n, s) for n in held if layouts.assignment[n].shards for s in layouts.states.splits(n)
    )


def _code(producers: Mapping[str, Op], failure: Unsolvable) -> tuple[Any, ...]:
    """Return the source line of an op and its module, without block numbers.

    Of a tensor that enters or leaves a module, it is what the size was computed from.
    """
    size = failure.size
    if (op := producers.get(size.tensor)) is not None:
        return op.source, pattern(op.module)
    return size.dim, size.bound, _without_modules(size.expression)


def _without_modules(expression: Expression) -> Expression:
    """Return an expression without the numbers of its reads and the modules of its attributes."""
    head, *rest = expression
    if head in ("attribute", "read", "constant"):
        return head, *(rest[1:] if head == "attribute" else rest[:1])
    return head, *(_without_modules(each) for each in rest)


def _near_size(graph: Graph, layouts: Layouts, unsolvable: Unsolvable) -> Splits:
    """Return the splits near a size; if there are none, near sizes with the same attributes."""
    near = _near(graph, layouts, unsolvable.size.tensor)
    for other in () if near else unsolvable.others:
        near |= _near(graph, layouts, other.tensor)
    return near


def _near(graph: Graph, layouts: Layouts, tensor: str) -> Splits:
    """Return the split of `tensor`, or else of the inputs of its op."""
    assignment = layouts.assignment
    if assignment[tensor].shards:
        return frozenset({(tensor, assignment[tensor].shards)})
    op = graph.producers().get(tensor)
    names = op.inputs if op else ()
    return frozenset((n, assignment[n].shards) for n in names if assignment[n].shards)
