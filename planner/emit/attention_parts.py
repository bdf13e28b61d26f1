"""Finds which part of a fused projection is the query, the key and the value of attention."""

from __future__ import annotations

from shardwright.planner.emit.elements import WEIGHT, Elements
from shardwright.planner.graph.graph import Op
from shardwright.planner.graph.kv_cache import ATTENTION

WORDS = ("query", "key", "value")
"""The first operands of attention."""
FAR = 100
"""Most ops between a projection and attention."""


def parts(elements: Elements) -> dict[int, list[str]]:
    """Return for each element with a fused output the words for its parts, in their order."""
    made = elements.graph.producers()
    found: dict[int, dict[int, str]] = {}
    for op in elements.graph.ops:
        if op.call.op in ATTENTION:
            for word, name in zip(WORDS, op.inputs, strict=False):
                cut = _cut(elements, made, name)
                if cut is not None:
                    found.setdefault(cut[0], {}).setdefault(cut[1], word)
    return {at: [row[i] for i in sorted(row)] for at, row in found.items() if len(row) > 1}


def _cut(elements: Elements, made: dict[str, Op], name: str) -> tuple[int, int] | None:
    """Return the element whose output a tensor is a part of, and the position of the part."""
    place = None
    for _ in range(FAR):
        if (boundary := elements.entered.get(name)) is not None:
            name = boundary.source
            continue
        op = made.get(name)
        if op is None:
            return None
        if any(elements.origin(n) == WEIGHT for n in op.inputs) and op.outputs[0] == name:
            at = elements.made.get(name)
            rule = elements.rules.get(op.name)
            if rule is not None and rule.sum:
                return None if place is None or at is None else (at, place)
        if len(op.outputs) > 1:
            place = op.outputs.index(name)
        elif op.call.op in ("slice", "select"):
            place = _start(elements, op)
        name = next((n for n in op.inputs if elements.origin(n) not in (None, WEIGHT)), "")
    return None


def _start(elements: Elements, op: Op) -> int:
    """Return the start of a slice, or the index of a selection."""
    arguments = op.call.arguments
    start = arguments.get("start", arguments.get("index"))
    dim = arguments.get("dim", 0)
    if not (isinstance(start, int) and isinstance(dim, int)):
        return 0
    size = elements.graph.tensors[op.inputs[0]].shape[dim]
    return start % size if start < 0 else start
