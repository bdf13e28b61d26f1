"""Check whether code that queries autocast computes the same under autocast, apart from casts.

The model is traced again and told that autocast is on, with the dtype of its parameters: casts to
that dtype have no effect.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.errors import ModelError
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.questions import noted
from shardwright.planner.trace.runs.trace_runs import trace_runs
from shardwright.planner.trace.trace_lock import alone

CASTING = ("to", "_to_copy", "type_as")
"""Ops that cast."""


def same_under_autocast(graph: Graph, source: Source, skips: bool) -> bool:
    """Return whether the runs of `source` compute the same under autocast as in `graph`."""
    floats = (p.dtype for p in source.module.parameters() if p.is_floating_point())
    try:
        with alone(), noted(next(floats, torch.float32)):
            other = trace_runs(source.module, source.runs, skips)
    except ModelError:
        return False
    return _computed(graph) == _computed(other)


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
