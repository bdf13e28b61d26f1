"""Which splits to forbid after a dry run that failed: those near to where it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.dry_run.local_sizes import Unsolvable
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.state import Shards

Splits = frozenset[tuple[str, Shards]]


@dataclass(frozen=True)
class Conflict:
    """Splits that did not pass a dry run, and what went wrong.

    `module` is where, if that is all that is known of it.
    """

    splits: Splits
    text: str
    module: str | None = None


def of_size(
    unsolvable: Unsolvable, layouts: Layouts, earlier: Sequence[Conflict] = ()
) -> Conflict | None:
    """The conflict at a size that no attributes give; None if nothing is split there.

    What fails at the same line of like modules is forbidden with it: blocks that could not be
    folded would fail one after the other.
    """
    graph = layouts.graph
    producers = graph.producers()
    op = producers.get(unsolvable.size.tensor)
    near = _near_size(graph, layouts, unsolvable)
    if not near:
        return of_module(op.module if op else "", str(unsolvable), layouts, earlier)
    for more in unsolvable.more:
        other = producers.get(more.size.tensor)
        if op and other and _line(op) == _line(other):
            near |= _near_size(graph, layouts, more)
    return Conflict(near, str(unsolvable))


def of_module(
    module: str, text: str, layouts: Layouts, earlier: Sequence[Conflict] = ()
) -> Conflict | None:
    """The conflict where `module`, or one in it, did what `text` says; None if nothing is split.

    A module whose local forward fails may not have the splits that it had; if it failed before,
    none at all; if it still fails, nor may the module around it. So a search ends, at the latest
    with nothing split.
    """
    graph, states, assignment = layouts.graph, layouts.states, layouts.assignment
    if states.sequence and (along := _along(graph, layouts, module)):
        return Conflict(along, text)
    names = _tensors_in(graph, module)
    if split := frozenset((n, assignment[n].shards) for n in names if assignment[n].shards):
        if any(conflict.module == module for conflict in earlier):
            split = frozenset((n, s) for n in names for s in states.splits(n))
        return Conflict(split, text, module)
    if gathered := _gathered(graph, layouts, names):
        return Conflict(gathered, text)
    return of_module(module.rpartition(".")[0], text, layouts, earlier) if module else None


def _along(graph: Graph, layouts: Layouts, module: str) -> Splits:
    """Splits along a sequence of what the own code of `module` and its like reads or makes.

    But not of the hidden states that must have them.
    """
    sequence = layouts.states.sequence
    assert sequence is not None
    names = {
        name
        for op in graph.ops
        if pattern(op.module) == pattern(module)
        for name in (*op.inputs, *op.outputs)
    }
    found = {(n, layouts.assignment[n].shards) for n in names - sequence.handed.keys()}
    return frozenset((n, shards) for n, shards in found if sequence.splits(shards))


def _tensors_in(graph: Graph, module: str) -> set[str]:
    """Tensors that ops in `module` or in one within it read or make."""
    return {
        name
        for op in graph.ops
        if not module or is_within(op.module, module)
        for name in (*op.inputs, *op.outputs)
    }


def _gathered(graph: Graph, layouts: Layouts, names: set[str]) -> Splits:
    """Every split of weights that are held in parts, of which `names` has what is read whole."""
    held = {u.stored for u in graph.uses if u.used in names}
    return frozenset(
        (n, s) for n in held if layouts.assignment[n].shards for s in layouts.states.splits(n)
    )


def _line(op: Op) -> tuple[str, str]:
    """The line of code that an op stands in, and where, but for the number of the block."""
    return op.source, pattern(op.module)


def _near_size(graph: Graph, layouts: Layouts, unsolvable: Unsolvable) -> Splits:
    """The splits near a size; if there are none, near those that want the same attributes."""
    near = _near(graph, layouts, unsolvable.size.tensor)
    for other in () if near else unsolvable.others:
        near |= _near(graph, layouts, other.tensor)
    return near


def _near(graph: Graph, layouts: Layouts, tensor: str) -> Splits:
    """The split of `tensor`, or of what its op was given."""
    assignment = layouts.assignment
    if assignment[tensor].shards:
        return frozenset({(tensor, assignment[tensor].shards)})
    op = graph.producers().get(tensor)
    names = op.inputs if op else ()
    return frozenset((n, assignment[n].shards) for n in names if assignment[n].shards)
