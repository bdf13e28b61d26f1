"""Deduplicates blocks in a dry run: a call of a block that equals an earlier call is not run again.

What a block's code does depends on how the block is built, on its inputs, on its index, and on
training mode. Blocks with the same place in a `Stack` are built alike. The inputs of calls are
compared. The index in each block is replaced by an object that records reads; if code reads it,
no calls are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwright.planner.blocks.stacks import Stack
from shardwright.planner.trace.data_queries.stand_ins import WatchedNumber
from shardwright.planner.trace.model.module_copies import plain
from shardwright.planner.trace.model.skeletons import Hollow, Missing, is_hollow
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.trial.call_log import RUNS, Call, Calls

PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Incomparable(Exception):
    """A value that cannot be compared with others."""


@dataclass
class DeduplicatedBlocks:
    """The outputs of blocks of `stacks` in one run of a model or of a part of it.

    Attributes:
        stacks: Stacks of blocks.
        only: The calls that may be left out, by name of the block and number of the call; None for
            all that equal an earlier call.
        hollow: Blocks that were copied without their contents, because they will not run.
        left_out: The calls that were left out.
        numbered: Whether code read the index of a block.
    """

    stacks: Sequence[Stack]
    only: frozenset[tuple[str, int]] | None = None
    hollow: Hollow = field(default_factory=Hollow)
    left_out: set[tuple[str, int]] = field(default_factory=set, init=False)
    numbered: bool = field(default=False, init=False)
    _given: dict[Hashable, Any] = field(default_factory=dict, init=False)
    _kept: list[Any] = field(default_factory=list, init=False)
    """Tensors that are compared by their ids, so their memory must not be reused."""

    def put_in(self, root: nn.Module) -> None:
        """Wrap the forwards of the blocks of `root`, so that equal calls run once."""
        for stack in self.stacks:
            for place, (n, block) in zip(
                stack.traced, root.get_submodule(stack.path).named_children(), strict=True
            ):
                like = stack.path, place
                put_around(block, partial(self._once, f"{stack.path}.{n}", block, like))

    def watch(self, root: nn.Module) -> None:
        """Do as `put_in`, and make the indices of blocks record whether code reads them."""
        self.put_in(root)
        for stack in self.stacks:
            for block in root.get_submodule(stack.path).children():
                for path, name, _ in stack.counters:
                    if path and is_hollow(block):
                        continue
                    variables = vars(block.get_submodule(path))
                    variables[name] = WatchedNumber(variables[name], self._asked)

    def _asked(self) -> None:
        self.numbered = True

    def _once(self, name: str, block: nn.Module, like: Hashable, forward: Forward) -> Forward:
        calls = 0
        if is_hollow(block):
            forward = self._missing

        @wraps(forward)
        def once(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            call, calls = (name, calls), calls + 1
            given = [*args, *kwargs.values()]
            try:
                with torch._C.DisableTorchFunction():  # hide this from modes that record calls
                    values = tuple(self._describe(given, given))
                key = like, block.training, len(args), (*kwargs,), values
            except Incomparable:
                return forward(*args, **kwargs)
            if key in self._given and (self.only is None or call in self.only):
                self.left_out.add(call)
                return tree_map(partial(_again, given), self._given[key])
            out = forward(*args, **kwargs)
            if _can_give_again(out):
                self._given.setdefault(key, tree_map(partial(_noted, given), out))
            return out

        return once

    def _missing(self, *_args: Any, **_kwargs: Any) -> Any:
        """Replace the forward of a hollow block.

        Raises:
            Missing: always.
        """
        self.hollow.asked = True
        raise Missing

    def _describe(self, values: Sequence[Any], given: Sequence[Any]) -> Iterator[Hashable]:
        for value in values:
            if isinstance(value, tuple):
                yield type(value), tuple(self._describe(value, given))
            elif isinstance(value, Tensor) and value.is_floating_point():
                place = next((i for i, v in enumerate(given) if v is value), None)
                yield place, (*value.shape,), value.stride(), value.dtype, value.requires_grad
            elif isinstance(value, Tensor):  # code may depend on the values
                self._kept.append(value)
                yield id(value)
            elif isinstance(value, PLAIN_TYPES):
                yield type(value), value
            else:
                raise Incomparable


def duplicate_blocks(root: nn.Module, stacks: Sequence[Stack]) -> dict[str, nn.Module]:
    """Return the blocks that have the same place in their stack as an earlier block."""
    found: dict[str, nn.Module] = {}
    for stack in stacks:
        seen: set[int] = set()
        blocks = root.get_submodule(stack.path).named_children()
        for place, (n, block) in zip(stack.traced, blocks, strict=True):
            if place in seen and plain(block):
                found[f"{stack.path}.{n}"] = block
            seen.add(place)
    return found


def _can_give_again(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_give_again, value))
    return isinstance(value, (Tensor, *PLAIN_TYPES))


def _noted(given: Sequence[Any], value: Any) -> Any:
    """Return an output of a call with the inputs `given`, as a function of those of a later call.

    An output that is no tensor is returned as it is.
    """
    if not isinstance(value, Tensor):
        return value
    for place, one in enumerate(given):
        if one is value:
            return itemgetter(place)
    how: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    make = partial(torch.empty_strided, value.shape, value.stride(), **how)
    return lambda _: make()


def _again(given: Sequence[Any], value: Any) -> Any:
    with torch._C.DisableTorchFunction():  # not a call of the model's code
        return value(given) if callable(value) else value


Between = tuple[str, int, tuple[Call, ...], int]
"""(stack, kind of a block, calls until the next block, kind of the next block)."""


def calls_between_blocks(calls: Calls, stacks: Sequence[Stack]) -> set[Between]:
    """Return the calls between consecutive blocks of stacks, from the `calls` of a model."""
    return {found for made in calls.values() for stack in stacks for found in _between(made, stack)}


def _between(calls: Sequence[Call], stack: Stack) -> Iterator[Between]:
    before: int | None = None
    since: list[Call] = []
    for call in calls:
        kind = _kind(call, stack)
        if kind is None:
            since.append(call)
            continue
        if before is not None:
            yield stack.path, before, tuple(since), kind
        before, since = kind, []


def _kind(call: Call, stack: Stack) -> int | None:
    """Return the kind of the block that a call runs; None if it does not run a block."""
    if call.function != RUNS:
        return None
    path, _, number = str(call.numbers[0]).rpartition(".")
    return stack.kinds[int(number)] if path == stack.path else None
