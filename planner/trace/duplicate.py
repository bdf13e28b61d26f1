"""Copies of modules whose code does the same in the same order."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.runtime.code.closures import OWN, functions, rebound

T = TypeVar("T", bound=nn.Module)


def duplicate(module: T, memo: Mapping[int, object] | None = None) -> T:
    """A deep copy of `module`, but for some of what model code keeps.

    Sets are shared: the copy of one may be iterated in another order, and calls made in a loop over
    it with it. So are compiled functions, which nothing changes. Of what was computed from
    parameters, the copy does not know from which. Functions that hold parts of `module` hold those
    of the copy.

    `memo` is as for `copy.deepcopy`.
    """
    parts = [vars(part) for part in module.modules()]
    made = {id(value): new for value in _kept(parts) if (new := _instead(value)) is not None}
    copied: dict[int, Any] = {**_without_hooks(parts), **made, **(memo or {})}
    out = copy.deepcopy(module, copied)
    for _, part, name, function in functions(out):
        vars(part)[name] = rebound(function, lambda v: copied.get(id(v), v))
    return out


@contextmanager
def duplicated(module: T) -> Iterator[T]:
    """A duplicate of `module` to run within, and to change; it is of no use afterwards.

    Its modules refer to each other in circles, as does what is put around their forwards. That
    waits for the garbage collector, which has long to look.
    """
    out = duplicate(module)
    try:
        yield out
    finally:
        for part in [*out.modules()]:
            vars(part).clear()


def _kept(parts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for part in parts:
        yield from (value for name, value in part.items() if name not in OWN)


def _without_hooks(parts: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """Empty dicts for those in which modules would keep hooks: most of what is copied."""
    stores = (value for part in parts for value in part.values())
    return {id(v): OrderedDict() for v in stores if type(v) is OrderedDict and not v}


def _instead(value: Any) -> Any:
    if isinstance(value, (set, frozenset, torch.jit.ScriptFunction)):
        return value
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach()
    return None
