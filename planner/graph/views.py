"""Ops that compute nothing: views, which share the memory of their operand, and plain copies."""

from __future__ import annotations

from functools import cache

from shardwright.planner.graph.graph import Op
from shardwright.rules.call import OpCall, packet_named

COPIES = frozenset("_to_copy clone contiguous lift_fresh_copy repeat".split())
UNDECLARED = frozenset({"_unsafe_view"})
"""Views that are not declared as views in their schema."""


def is_view(call: OpCall) -> bool:
    """Return whether a result of an op shares the memory of an operand, by its schema.

    A clone without a memory format counts as a view: it is what dropout becomes in eval mode.
    """
    if call.op == "clone":
        return call.arguments.get("memory_format") is None
    return _shares(call.op)


@cache
def _shares(op: str) -> bool:
    if op in UNDECLARED:
        return True
    packet = packet_named(op)
    if packet is None:
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    infos = [r.alias_info for s in schemas if "out" not in s.overload_name for r in s.returns]
    return any(info is not None and not info.is_write for info in infos)


def moved(op: Op, _: str) -> str | None:
    """Return the operand whose values the results of an op hold; None if the op computes."""
    return op.inputs[0] if op.inputs and is_move(op.call) else None


def is_move(call: OpCall) -> bool:
    """Return whether an op is a view or a copy: its results hold the values of the operand."""
    return call.op in COPIES or is_view(call)
