"""Refuse code that goes on from tensors that an earlier call left outside of modules.

A global, a class attribute or a default argument has no placement in a plan. What depends on no
data, such as a table by length, is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardwright.errors import ModelError
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.record.record import Call


class LeftOutside(NamedTuple):
    """A tensor that a traced call left outside of modules."""

    tensor: Tensor
    traced_call: int


def check_outside(
    calls: Sequence[Call], left: Sequence[LeftOutside], data: Iterable[Tensor]
) -> bool:
    """Return whether runs left tensors outside of modules that depend on `data`.

    Raises:
        ModelError: a later run reads one.
    """
    if not left:
        return False
    depends = {*map(id, data)}
    for call in calls:
        if any(id(x) in depends for x in tensors_in((call.args, call.kwargs))):
            depends |= {*map(id, tensors_in(call.result))}
    latest_first = reversed(left)
    since = {id(one.tensor): one.traced_call for one in latest_first if id(one.tensor) in depends}
    for call in calls if since else ():
        taken = tensors_in((call.args, call.kwargs))
        if any(since.get(id(x), call.traced_call) < call.traced_call for x in taken):
            at = f"'{call.module}'" if call.module else "the model"
            raise ModelError(
                f"cannot split {at} ({call.source}): it reads a tensor that an earlier call left "
                "outside of modules, in a global, a class attribute or a default argument, where a "
                "rank has a part: keep it as an attribute or a buffer of the module (self.x = ...)"
            )
    return bool(since)
