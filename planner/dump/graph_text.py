"""Writes the traced graph as text: one line per op, boundary and parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwright.planner.graph.graph import Boundary, Graph, Op
from shardwright.rules.call import Operand


def graph_text(graph: Graph) -> Iterator[str]:
    """Yield parameters, inputs, ops and boundaries in execution order, outputs, and marks."""
    yield "# parameters and buffers: name, as stored -> as its module sees it"
    for use in graph.uses:
        kind = "buffer" if use.is_buffer else "parameter"
        yield f"{kind} {use.fqn}: {tensor_text(graph, use.stored)} -> {use.used}"
    yield ""
    yield "# inputs"
    yield from (tensor_text(graph, name) for name in graph.inputs)
    yield ""
    yield "# ops and module boundaries: results, op (arguments), module, source line"
    yield from _in_order(graph)
    yield ""
    yield "# outputs"
    yield from (tensor_text(graph, name) for name in graph.outputs)
    yield ""
    yield "# marks (planner/graph/marks.py): what else is known of tensors"
    for kind, entries in graph.marks.entries():
        for entry in sorted(entries):
            yield f"{kind}: {entry if isinstance(entry, str) else ' '.join(map(str, entry))}"


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
