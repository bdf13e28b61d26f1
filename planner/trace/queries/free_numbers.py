"""Find number arguments of a model that may have any value: no code depends on their value.

The model is traced again with opaque numbers, which only torch may use, and only where the value
does not affect placements: as a factor or a term (see `opaque_ints.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plain_values import FREE
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.opaque_ints import Shows, hidden
from shardwright.planner.trace.record.boundaries import argument_names
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trace_runs import trace_runs
from shardwright.planner.trace.trace_lock import alone


def free_numbers(graph: Graph, source: Source) -> frozenset[str]:
    """Return the number arguments in the runs of `source` whose values no code depends on.

    `graph` is the graph of the source.
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
    """Return whether the trace computes the same with these arguments opaque."""
    asked: list[Any] = []
    calls = len(source.runs) * (100 + 20 * len(graph.ops))
    for sign in (-1, 1):
        shows = functools.partial(Shows, asked, calls)
        undo = put_around(source.module, functools.partial(_hiding, names, sign, shows))
        try:
            with alone():
                found = trace_runs(source.module, source.runs)
        except ModelError:
            return False
        finally:
            undo()
        if asked or _ops(found) != _ops(graph):
            return False
    return True


def _hiding(
    names: Collection[str], sign: int, shows: Callable[[], Shows], forward: Forward
) -> Forward:
    """Return `forward` with the numbers `names` opaque, within a new mode from `shows`."""
    positions = argument_names(forward)

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


def _ops(graph: Graph) -> list[tuple[str, str, list[Any]]]:
    shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
    return [(op.module, op.call.op, [shapes[n] for n in op.outputs]) for op in graph.ops]
