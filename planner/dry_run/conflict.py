"""Which splits to forbid after a trial that failed: those near to where it did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shardwright.errors import ModelError
from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.dry_run.attributes import Unsolvable
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.states import Shards

Splits = frozenset[tuple[str, Shards]]


@dataclass(frozen=True)
class Failure:
    """Splits that did not pass the trial, and what went wrong."""

    splits: Splits
    text: str


@dataclass
class Blame:
    """Where trials of one graph failed so far.

    A module whose local forward fails may not have the splits that it had; if it fails again, none
    at all; if it still fails, nor may the module around it. So the search ends, at the latest with
    nothing split.
    """

    graph: Graph
    architecture: str
    strikes: Counter[str] = field(default_factory=Counter)

    def of_size(self, unsolvable: Unsolvable, layouts: Layouts) -> Failure:
        """After a size that no attributes give.

        What fails at the same line of like modules is forbidden with it: blocks that could not be
        folded would fail one after the other.

        Raises:
            ModelError: nothing is split.
        """
        producers = self.graph.producers()
        op = producers.get(unsolvable.size.tensor)
        near = _near_size(self.graph, layouts, unsolvable)
        if not near:
            return self.of_module(op.module if op else "", str(unsolvable), layouts)
        for more in unsolvable.more:
            other = producers.get(more.size.tensor)
            if op and other and _line(op) == _line(other):
                near |= _near_size(self.graph, layouts, more)
        return Failure(near, str(unsolvable))

    def of_module(self, module: str, text: str, layouts: Layouts) -> Failure:
        """After `module`, or one in it, did what `text` says.

        Raises:
            ModelError: nothing was split where it failed: the model itself cannot run on meta.
        """
        while True:
            if layouts.states.sequence and (split := _along(self.graph, layouts, module)):
                return Failure(split, text)
            names = _tensors_in(self.graph, module)
            split = frozenset(
                (n, layouts.assignment[n].shards) for n in names if layouts.assignment[n].shards
            )
            if split:
                self.strikes[module] += 1
                if self.strikes[module] > 1:
                    split = frozenset((n, s) for n in names for s in layouts.states.splits(n))
                return Failure(split, text)
            if gathered := _gathered(self.graph, layouts, names):
                return Failure(gathered, text)
            if not module:
                raise ModelError(
                    f"{self.architecture} itself fails on meta, so no plan can be tried: {text}"
                )
            module = module.rpartition(".")[0]


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
