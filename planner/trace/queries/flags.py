"""Flags and numbers that modules get as arguments in a trace, except sizes of tensors.

A user who calls a module by itself may pass no other values, because its code may then do something
else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwright.planner.contract.plain_values import (
    FREE,
    PlainValue,
    is_said,
    plain_value,
    same_value,
)
from shardwright.planner.trace.queries.opaque_ints import Hidden
from shardwright.planner.trace.sizes.expressions import reads_of
from shardwright.planner.trace.sizes.provenance import SourcedInt

SIZE = object()
"""Marks an argument that is a size of a tensor."""


class Noted:
    """The calls of one module: argument name -> flag or number, None for other values.

    Args:
        forward: The module's own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        found = signature(forward).parameters.values()
        named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.defaults = {p.name: p.default for p in named if p.default is not Parameter.empty}
        self.calls: list[dict[str, Any]] = []
        self.unsaid: set[str] = set()
        """Arguments that had neither tensors nor a value that a plan can name."""

    def call(self, given: Mapping[str, Any]) -> None:
        """Note a call with these arguments."""
        self.calls.append({n: _flag(v) for n, v in given.items() if n not in FREE})
        others = [n for n, flag in self.calls[-1].items() if flag is None or flag is SIZE]
        self.unsaid.update(
            n for n in others if not any(map(torch.is_tensor, tree_leaves(given[n])))
        )

    def flags(self) -> dict[str, list[PlainValue]]:
        """Return the values of each argument that is a flag, also by default."""
        names = dict.fromkeys([*self.defaults, *(n for call in self.calls for n in call)])
        out = {}
        for name in names:
            left_out = _flag(self.defaults.get(name))
            had = [call.get(name, left_out) for call in self.calls]
            if SIZE in had:
                continue
            flags = _distinct(one for (one,) in filter(None, had))
            if name not in FREE and (flags or (left_out or (None,)) != (None,)):
                out[name] = flags
        return out


Flags = dict[str, dict[str, list[PlainValue]]]


def add_flags(known: Flags, more: Flags) -> None:
    """Add flags of further calls to `known`."""
    for module, flags in more.items():
        mine = known.setdefault(module, {})
        for name, values in flags.items():
            mine[name] = _distinct([*mine.get(name, ()), *values])


def free_flags(known: Flags, left: Flags) -> dict[str, set[str]]:
    """Take flags out of `known` that are not `left` where numbers are opaque, and return them."""
    free = {module: {*flags} - {*left.get(module, {})} for module, flags in known.items()}
    for module, names in free.items():
        known[module] = {n: values for n, values in known[module].items() if n not in names}
    return free


def _flag(value: Any) -> Any:
    if isinstance(value, Hidden):
        return SIZE
    if isinstance(value, SourcedInt) and reads_of(value.expression):
        return SIZE
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    return (plain_value(value),) if is_said(value) else None


def _distinct(values: Iterable[PlainValue]) -> list[PlainValue]:
    out: list[PlainValue] = []
    for value in values:
        if not any(same_value(value, one) for one in out):
            out.append(value)
    return out
