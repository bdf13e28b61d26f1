"""Does code that asks for autocast compute the same with it, but for what it casts?

It is traced again, and told that autocast is on, with the dtype that its parameters have: a cast to
that is none.
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
"""Ops that cast, to what the tensor is already."""


def same_under_autocast(graph: Graph, source: Source, skips: bool) -> bool:
    """Whether the runs of `source`, as `graph` has them, do the same under autocast."""
    floats = (p.dtype for p in source.module.parameters() if p.is_floating_point())
    try:
        with alone(), noted(next(floats, torch.float32)):
            other = trace_runs(source.module, source.runs, skips)
    except ModelError:
        return False
    return _computed(graph) == _computed(other)


def _computed(graph: Graph) -> list[Any]:
    """The ops in order, but for casts, with what they take: by the number of what made it."""
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
