"""Whole numbers among example inputs that code computes sizes from: grids, places of an image.

Where a model cannot be traced without data it is traced with the values of the integers and masks
that it was given. As with sizes, the plan then holds for what the code does with such values.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import ModelError
from shardwright.planner.blocks.fold import Folding
from shardwright.planner.blocks.unfold import Unfolded
from shardwright.planner.problem.pins import Pin
from shardwright.planner.trace.folded_trace import trace_all
from shardwright.planner.trace.source import Source

Traced = tuple[Source, Folding, Unfolded]


def trace_with_values(
    source: Source, pins: Sequence[Pin] = (), ends: bool = False, folds: bool = True
) -> Traced:
    """`trace_all`, with values of inputs where nothing can be traced without.

    Raises:
        ModelError: the model cannot be traced.
    """
    try:
        return trace_all(source, pins, ends, folds)
    except ModelError:
        valued = source.with_values()
        if valued is None:
            raise
        return trace_all(valued, pins, ends, folds)
