"""Log plain values that users see: non-tensor outputs of a run, and values left in attributes.

On a rank, code may compute them from local sizes. They are therefore logged like calls
(`call_log.py`), and a trial compares them with those of the unsharded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import islice
from numbers import Number
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.planner.trace.runs.run import Run, Runner, State
from shardwright.planner.trace.state.attribute_contents import NOT_KEPT
from shardwright.planner.trace.trial.call_log import Call, Calls
from shardwright.runtime.code.model_objects import is_config
from shardwright.runtime.slots import HOLD_NO_TENSORS, but_state, parts

GIVES, KEEPS = "gives", "keeps"
"""Log entries for values that a run returns, and for values in an attribute."""

MAX_PARTS = 1000
"""The most parts that are searched in one value."""


class UsersValues:
    """Logs in `calls` the values that users see in runs of `root`."""

    def __init__(self, root: nn.Module, calls: Calls) -> None:
        self.root, self._calls = root, calls
        self._modules = [*root.named_modules()]
        self._attributes = [_attributes(module) for _, module in self._modules]
        self._paths: list[str] = []

    def runner(self, runs: Sequence[Run]) -> Runner:
        """Return the runner that makes `runs` and logs the values."""

        def begin(traced_call: int, _: State) -> None:
            self._paths.append(runs[traced_call].module)

        return Runner(self.root, begin, self._end, on_fake=True)

    def _end(self, _: State, output: Any) -> None:
        takes = signature(self.root.get_submodule(self._paths[-1]).forward).parameters
        given = [value for _, value in but_state(output, takes)]
        self._note(self._paths[-1], GIVES, (), given)
        for i, (path, module) in enumerate(self._modules):
            before, values = self._attributes[i], vars(module)
            if not before.held and _same(before.values, values):
                continue
            now = self._attributes[i] = _attributes(module)
            for name, value in now.values.items():
                other = value is not before.values.get(name)
                if other or now.held.get(name) != before.held.get(name):
                    self._note(path, KEEPS, (name,), value)

    def _note(self, path: str, kind: str, at: tuple[str, ...], value: Any) -> None:
        self._calls.setdefault(path, []).append(Call(kind, (*at, *_values(value))))


class Attributes(NamedTuple):
    """The attributes of a module, and the plain values in attributes that may change in place."""

    values: dict[str, Any]
    held: dict[str, list[Any]]


def _attributes(module: nn.Module) -> Attributes:
    found = {n: v for n, v in vars(module).items() if _is_own_name(n)}
    held = {
        n: v
        for n, v in found.items()
        if v is not None and not isinstance(v, (Tensor, *HOLD_NO_TENSORS))
    }
    return Attributes(found, {name: [*_values(value)] for name, value in held.items()})


def _is_own_name(name: str) -> bool:
    return name not in NOT_KEPT and not name.startswith("_shardwright")


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    mine = {n: v for n, v in now.items() if _is_own_name(n)}
    return len(mine) == len(before) and all(map(is_, mine.values(), before.values()))


def _values(value: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield the plain values in a value, and the shapes of its integer tensors, in order."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            if not (value.is_floating_point() or value.is_complex()):
                yield tuple(value.shape)
    elif isinstance(value, int) and type(value) is not bool:
        yield int.__add__(value, 0)  # a plain int: `SourcedInt` and others note each use
    elif isinstance(value, (Number, str, bytes)):
        yield value if value == value else "nan"
    elif isinstance(value, (slice, range)):
        yield from _values((value.start, value.stop, value.step))
    elif not (isinstance(value, HOLD_NO_TENSORS) or is_config(value) or id(value) in around):
        for pair in [*islice(parts(value) or (), MAX_PARTS)]:  # keys may be numbers too
            for part in pair:
                yield from _values(part, (*around, id(value)))
