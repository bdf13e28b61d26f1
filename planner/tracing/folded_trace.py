"""Trace a model with one block of each kind, or whole where its blocks cannot be folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.errors import ModelError
from shardwright.planner.folding.folding import Folding, Unfoldable, fold
from shardwright.planner.folding.stacks import find_stacks, holders, shared_beyond, shortened
from shardwright.planner.folding.unfolding import Unfolded, unfold
from shardwright.planner.network.pins import Pin, matches
from shardwright.planner.tracing.source import Source
from shardwright.planner.tracing.trace import trace


def trace_all(
    source: Source, pins: Sequence[Pin] = (), ends: bool = False
) -> tuple[Source, Folding, Unfolded]:
    """`trace_folded`, and the source without those runs after the first that cannot be traced."""
    while source.more:
        try:
            return source, *trace_folded(source, pins, ends)
        except ModelError:
            source = replace(source, more=source.more[:-1])
    return source, *trace_folded(source, pins, ends)


def trace_folded(
    source: Source, pins: Sequence[Pin] = (), ends: bool = False
) -> tuple[Folding, Unfolded]:
    """The folded graph of a model, and the whole one.

    Args:
        source: The model.
        pins: Blocks with different pins are not folded into one.
        ends: Nor are the first and the last block of a stack with those between them.

    Raises:
        ModelError: the model cannot be traced.
    """
    module, owners = source.module, holders(source.module)

    def label(name: str) -> tuple[Pin, ...]:
        return tuple(p for p in pins if matches(p.name, name))

    for apart in (True,) if ends else (False, True):
        stacks = find_stacks(module, apart, label if pins else None, owners)
        if not stacks:
            continue
        try:
            with shortened(module, stacks):
                graph = trace(module, source.args, source.kwargs, source.more)
                folding = fold(graph, stacks, shared_beyond(module, stacks, owners))
            return folding, unfold(folding)
        except Unfoldable:
            continue  # with more blocks, or whole
        except ModelError:
            break  # its code counts on all blocks, or the model cannot be traced at all
    folding = Folding(trace(module, source.args, source.kwargs, source.more))
    return folding, unfold(folding)
