"""Finds the tensors that autograd saves for the backward pass, by running each op on meta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwright.planner.graph.graph import Op, Tensor
from shardwright.planner.graph.kv_cache import ATTENTION
from shardwright.rules.call import Operand, packet_named

MAX_ENTRIES = 10_000
"""The most entries of `_known`."""

_known: dict[str, frozenset[int]] = {}
"""An op, its arguments, shapes and dtypes -> the numbers of the operands and results it saves."""


class SavedForBackward:
    """Finds which of a graph's `tensors` ops save for backward. Ops that are alike run once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._by_call: dict[tuple[int, tuple[bool, ...]], frozenset[int]] = {}
        """The same as `_known`, by the id of a call, which copies of a block share."""

    def of(self, op: Op) -> list[str]:
        """Return the inputs and outputs of `op` that it saves."""
        names = (*op.inputs, *op.outputs)
        grads = tuple(self._tensors[n].differentiable for n in names)
        if not any(grads[len(op.inputs) :]):
            return []
        if (saved := self._by_call.get((id(op.call), grads))) is None:
            call = op.call
            key = f"{call.op} {call.arguments} {call.operands} {call.operand_dtypes} {grads}"
            if len(_known) >= MAX_ENTRIES:
                _known.clear()
            if key not in _known:
                _known[key] = _run(op, grads)
            saved = self._by_call[id(call), grads] = _known[key]
        return [names[i] for i in sorted(saved)]


def _run(op: Op, grads: tuple[bool, ...]) -> frozenset[int]:
    """Return the numbers of the saved operands and results.

    If the op cannot be run alone, these are all differentiable operands. Attention is not run: on
    meta it would save its scores, which the fused kernels do not.
    """
    ins, both = len(op.inputs), len(grads)
    if op.call.op in ATTENTION:
        return frozenset({0, 1, 2, ins})
    dtypes = zip(op.call.operands, op.call.operand_dtypes, grads, strict=False)
    given = [torch.empty(s, dtype=t, device="meta", requires_grad=g) for s, t, g in dtypes]
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
        made = _call(op, given)
    if made is None:
        return frozenset(i for i in range(ins) if grads[i])
    results = [t for t in (made if isinstance(made, (tuple, list)) else [made])]
    have = [*given, *(t for t in results if isinstance(t, torch.Tensor))][:both]
    memory = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(have)))}
    found = {memory.get(t.untyped_storage()._cdata) for t in saved}
    return frozenset(i for i in found if i is not None)


def _call(op: Op, given: list[torch.Tensor]) -> Any:
    """Return the results of the overload with these arguments; None if no overload takes them."""
    packet = packet_named(op.call.op)
    for overload in packet.overloads() if packet is not None else ():
        call = getattr(packet, overload)
        names = [a.name for a in call._schema.arguments]
        if set(names) == op.call.arguments.keys():
            try:
                return call(**{n: _argument(v, given) for n, v in op.call.arguments.items()})
            except (RuntimeError, TypeError, NotImplementedError):
                continue
    return None


def _argument(value: Any, given: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return given[value.index]
    return [_argument(v, given) for v in value] if isinstance(value, (list, tuple)) else value
