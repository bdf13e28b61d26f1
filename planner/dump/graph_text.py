"""Writes the traced graph as text: one line per op, boundary and parameter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.planner.graph.graph import Boundary, Graph, Op
from shardwright.planner.templates import rendered
from shardwright.rules.call import Operand


def graph_text(graph: Graph) -> str:
    """Return parameters, inputs, ops and boundaries in execution order, outputs, and marks."""
    tensor = partial(tensor_text, graph)
    folder = Path(__file__).parent
    return rendered(folder, "graph.txt", graph=graph, tensor=tensor, lines=_in_order(graph))


def tensor_text(graph: Graph, name: str) -> str:
    """Write a tensor with shape and dtype: `linear:3x19x64 float32`; `!` if it has no gradient."""
    tensor = graph.tensors[name]
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    mark = "" if tensor.differentiable else "!"
    return f"{name}:{shape} {str(tensor.dtype).removeprefix('torch.')}{mark}"


def op_text(graph: Graph, op: Op) -> str:
    """Write an op with its results, arguments, module and source line."""
    made = ", ".join(tensor_text(graph, n) for n in op.outputs) or "nothing"
    given = ", ".join(f"{k}={_value(v, op)}" for k, v in op.call.arguments.items() if v is not None)
    times = graph.times(op.name)
    return (
        f"{made} = {op.call.op}({given})  in '{op.module}' ({op.source})"
        f"{f'  x{times}' if times > 1 else ''}"
    )


def boundary_text(graph: Graph, boundary: Boundary) -> str:
    """Write a tensor that enters or leaves a module, where only its placement may change."""
    way = "enters" if boundary.side == "in" else "leaves"
    slot = f" as '{boundary.slot}'" if boundary.slot else ""
    after = tensor_text(graph, boundary.target)
    return f"{after} = {boundary.source}  {way} '{boundary.module}'{slot}"


def _in_order(graph: Graph) -> Iterator[str]:
    """Yield ops, each after the boundaries that its operands crossed."""
    waiting = {b.target: b for b in graph.boundaries}

    def crossed(name: str) -> Iterator[str]:
        boundary = waiting.pop(name, None)
        if boundary is not None:
            yield from crossed(boundary.source)
            yield boundary_text(graph, boundary)

    for op in graph.ops:
        for name in op.inputs:
            yield from crossed(name)
        yield op_text(graph, op)
    for name in list(waiting):
        yield from crossed(name)


def _value(value: Any, op: Op) -> str:
    if isinstance(value, Operand):
        return op.inputs[value.index]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(v, op) for v in value)}]"
    return str(value)
