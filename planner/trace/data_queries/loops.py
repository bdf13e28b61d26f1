"""Loops over the rows that data selects (`for expert in hit.nonzero():`), while there is no data.

Every pass is traced that any data could make, with the number of the row that it is for. At run
time some of them are made, none maybe. That is as right as all of them where each pass is
independent of the others (`loop_code.py`) but for tensors that it changes in place, and where such
a tensor is in one state before the loop, in it and after it: then it does not matter which of the
changes are made. What a pass makes else nobody reads outside of it. Numbers of rows are known where
the mask is as long as the model says; within a pass that some ranks may make alone nothing is sent
between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardwright.planner.trace.record.arguments import tensors_in
from shardwright.rules.call import name_of

SAME = {"detach", "lift_fresh_copy"}
"""Ops whose result is their operand."""


@dataclass
class Loop:
    """A loop that ran: the numbers of the calls that its passes began and ended with."""

    mask: Tensor | None
    """Which rows there are, data says: of a mask as long as the model says. None of what a test
    goes around, which is a pass that is made or not."""

    starts: list[int] = field(default_factory=list)
    stop: int | None = None
    """None until the last pass is made."""

    handed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What stood for names before and after a pass that may not be made, and that code after it
    reads: without that pass it reads what was before."""

    alike: bool = False
    """Whether all ranks make it or none does, as all read the same off data: they may send."""

    def pass_of(self, call: int) -> int:
        """The number of the pass that a call was made in; -1 for one outside."""
        inside = self.stop is not None and call < self.stop
        return bisect_right(self.starts, call) - 1 if inside else -1


def inner(value: Any) -> Any:
    """The fake tensor that holds the present value of a tensor of the run."""
    elem = value.elem if isinstance(value, FunctionalTensor) else value  # methods may take that
    if not (isinstance(elem, Tensor) and torch._is_functional_tensor(elem)):
        return value
    torch._functionalize_sync(elem)
    return torch._from_functional_tensor(elem)


def known(value: Any) -> bool:
    """Whether a tensor has a value though there is no data: one that code states."""
    return isinstance(value, Tensor) and getattr(inner(value), "constant", None) is not None


def carried(
    calls: Sequence[Any],
    loops: Iterable[Loop],
    replaced: Sequence[tuple[Tensor, Tensor]],
    results: Iterable[Tensor],
    has_value: Callable[[Tensor], bool] = lambda tensor: False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """What passes of loops change, before and after each change.

    Args:
        calls: All calls (`args`, `kwargs`, `result`) that were made.
        loops: The loops.
        replaced: Tensors after they were changed in place, and before.
        results: Tensors that are read after all calls.
        has_value: Whether a tensor has a value though there is no data.

    Raises:
        ValueError: something else that a pass made is read outside of it, or what it changes has a
            value: that would be the one after all passes.
    """
    first: dict[int, Tensor] = {}  # of tensors that are the same

    def one(tensor: Tensor) -> Tensor:
        return first.get(id(tensor), tensor)

    maker: dict[int, int] = {}
    readers: list[tuple[int, Tensor]] = []
    for i, call in enumerate(calls):
        if name_of(call.op) in SAME:
            first[id(call.result)] = one(call.args[0])
            continue
        readers += [(i, one(t)) for t in tensors_in((call.args, dict(call.kwargs)))]
        maker |= {id(t): i for t in tensors_in(call.result)}
    readers += [(len(calls), one(t)) for t in results]
    was = {id(one(now)): one(before) for now, before in replaced}
    for loop in loops:
        before_it = {**was, **{id(one(now)): one(before) for before, now in loop.handed}}
        for now, before in replaced:
            made = loop.pass_of(maker.get(id(one(now)), -1))
            outside = made != loop.pass_of(maker.get(id(one(before)), -1))
            if made >= 0 and outside and has_value(now):
                raise ValueError("passes of a loop over data change what has a value without data")
        escaping = {
            id(t): t
            for reader, t in readers
            if (made := loop.pass_of(maker.get(id(t), -1))) >= 0 and made != loop.pass_of(reader)
        }
        for tensor in escaping.values():
            while loop.pass_of(maker.get(id(tensor), -1)) >= 0:
                if (before := before_it.get(id(tensor))) is None:
                    raise ValueError("what a pass of a loop over data makes is read outside of it")
                if (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError("what code may go around gives another shape or dtype")
                yield before, tensor
                tensor = before
