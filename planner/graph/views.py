"""Ops that compute nothing: views, which share their operand's memory, and plain copies."""

from __future__ import annotations

from functools import cache

from shardwright.planner.graph.graph import Op
from shardwright.rules.call import OpCall, packet_named

COPIES = frozenset("_to_copy clone contiguous lift_fresh_copy repeat".split())
UNDECLARED = frozenset({"_unsafe_view"})
"""Views whose schema does not say so."""


def is_view(call: OpCall) -> bool:
    """Whether an op gives back memory of its operand, by its schema.

    A clone in no stated format is what becomes of dropout when it drops nothing: the operand.
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
    """The operand whose values the results of an op hold, if they hold nothing else."""
    return op.inputs[0] if is_move(op.call) else None


def is_move(call: OpCall) -> bool:
    """Whether the results hold the operand's values and nothing else."""
    return call.op in COPIES or is_view(call)
