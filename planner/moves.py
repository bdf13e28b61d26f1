"""Ops that compute nothing: views, which share their operand's memory, and plain copies."""

from __future__ import annotations

from functools import cache

import torch

COPIES = frozenset("_to_copy clone contiguous lift_fresh_copy repeat".split())
UNDECLARED = frozenset({"_unsafe_view"})
"""Views whose schema does not say so."""


@cache
def is_view(op: str) -> bool:
    """Whether the ATen op of that name gives back memory of its operand, by its schema."""
    if op in UNDECLARED:
        return True
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return False
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    infos = [r.alias_info for s in schemas if "out" not in s.overload_name for r in s.returns]
    return any(info is not None and not info.is_write for info in infos)


def is_move(op: str) -> bool:
    """Whether the results hold the operand's values and nothing else."""
    return op in COPIES or is_view(op)
