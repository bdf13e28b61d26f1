"""Runs that are traced again in another context, and compared with the first trace.

If both compute the same, the plan also holds in that context: in training mode, under autocast, or
with other values of the numbers among the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plain_values import FREE
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.flags import add_flags
from shardwright.planner.trace.queries.opaque_ints import Shows, hidden
from shardwright.planner.trace.queries.questions import Asked, noted
from shardwright.planner.trace.record.boundaries import argument_names
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trace_runs import trace_runs
from shardwright.planner.trace.runs.training_runs import (
    changes_more,
    in_training,
    no_python_random,
)
from shardwright.planner.trace.trace_lock import alone

CASTING = ("to", "_to_copy", "type_as")
"""Ops that cast."""

ELSE = ("ops", "marks", "trained", "unpriced", "draws", "flags", "places")
COMPARED = [f.name for f in fields(Graph) if f.name not in ELSE]


def _traced_again(
    source: Source,
    context: AbstractContextManager[Any],
    runs: Sequence[Run] | None = None,
    skips: bool = False,
) -> Graph | None:
    """Return the graph of the runs in a context; None if they cannot be traced there."""
    try:
        with alone(), context:
            return trace_runs(source.module, runs or source.runs, skips)
    except ModelError:
        return None


# --- training mode


def note_training(graph: Graph, source: Source, asked: Asked) -> None:
    """Set `graph.trained` if the runs of `source` compute the same in training mode.

    `asked` are the queries noted while `graph` was traced.
    """
    if any(run.training for run in source.runs):
        return
    if not (asked.training or graph.untraced or changes_more(source.module)):
        graph.trained = True
        return
    other = _traced_again(source, no_python_random(), in_training(source.runs))
    if other is not None and _same(graph, other):
        graph.trained, graph.marks.drawn = True, other.marks.drawn
        add_flags(graph.flags, other.flags)


def _same(one: Graph, other: Graph) -> bool:
    """Return whether two fresh graphs are equal, apart from source lines and random draws."""
    ends = [
        (replace(g.marks, drawn=set()), [op._replace(source="") for op in g.ops])
        for g in (one, other)
    ]
    return ends[0] == ends[1] and all(getattr(one, n) == getattr(other, n) for n in COMPARED)


# --- autocast


def same_under_autocast(graph: Graph, source: Source, skips: bool) -> bool:
    """Return whether the runs of `source` compute the same under autocast, apart from casts.

    Code is told that autocast is on, with the dtype of its parameters: casts to that dtype have no
    effect.
    """
    floats = (p.dtype for p in source.module.parameters() if p.is_floating_point())
    other = _traced_again(source, noted(next(floats, torch.float32)), skips=skips)
    return other is not None and _computed(graph) == _computed(other)


def _computed(graph: Graph) -> list[Any]:
    """Return the ops without casts, in order, with each operand as the number of its producer."""
    crossed = (*graph.boundaries, *graph.crossed)
    alias = {b.target: b.source for b in crossed if b.target != b.source}
    alias |= {op.outputs[0]: op.inputs[0] for op in graph.ops if _is_cast(op)}
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        while name in alias:
            name = alias[name]
        return made.get(name, name)

    out: list[Any] = []
    for op in graph.ops:
        if not _is_cast(op):
            out.append((op.module, op.traced_call, op.call, [*map(of, op.inputs)]))
            made |= {name: (len(out), i) for i, name in enumerate(op.outputs)}
    return [*out, [*map(of, graph.outputs)]]


def _is_cast(op: Op) -> bool:
    call = op.call
    alike = call.operand_dtypes == call.result_dtypes and call.operands == call.results
    return call.op in CASTING and alike and len(op.inputs) == 1


# --- numbers among the arguments


def free_numbers(graph: Graph, source: Source) -> frozenset[str]:
    """Return the number arguments in the runs of `source` whose values no code depends on.

    They are made opaque: only torch may use them, and only where the value does not affect
    placements, as a factor or a term (see `opaque_ints.py`). `graph` is the graph of the source.
    """
    names = {n for run in source.runs if not run.module for n in _numbers(source.module, run)}
    if not names or _decide_nothing(names, graph, source):
        return frozenset(names)
    return frozenset(n for n in names if len(names) > 1 and _decide_nothing({n}, graph, source))


def _numbers(module: nn.Module, run: Run) -> Iterator[str]:
    given = {**dict(zip(argument_names(module.forward), run.args, strict=False)), **run.kwargs}
    for name, value in given.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in FREE:
            yield name


def _decide_nothing(names: Collection[str], graph: Graph, source: Source) -> bool:
    """Return whether the runs compute the same with these arguments opaque."""
    asked: list[Any] = []
    calls = len(source.runs) * (100 + 20 * len(graph.ops))
    for sign in (-1, 1):
        shows = functools.partial(Shows, asked, calls)
        other = _traced_again(source, _hiding(source.module, names, sign, shows))
        if asked or other is None or _computed(other) != _computed(graph):
            return False
    return True


@contextmanager
def _hiding(
    module: nn.Module, names: Collection[str], sign: int, shows: Callable[[], Shows]
) -> Iterator[None]:
    """Context manager in which `module` gets the numbers `names` opaque, in a mode from `shows`."""
    positions = argument_names(module.forward)

    def hiding(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            def hide(name: str, value: Any) -> Any:
                number = isinstance(value, (int, float)) and name in names
                return hidden(value, sign, mode.asked) if number else value

            mode = shows()
            first = [hide(*pair) for pair in zip(positions, args, strict=False)]
            named = {name: hide(name, value) for name, value in kwargs.items()}
            with mode:
                return forward(*first, *args[len(first) :], **named)

        return run

    undo = put_around(module, hiding)
    try:
        yield
    finally:
        undo()
