"""Copies of modules whose code does the same in the same order."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.planner.trace.model.skeletons import HELD, Hollow
from shardwright.runtime.code.closures import OWN, functions, rebound

T = TypeVar("T", bound=nn.Module)

ATOMS = frozenset((type(None), bool, int, float, str))
"""Types of values that are their own copies: most of what modules keep."""
STORES = frozenset((dict, OrderedDict, set))
WAYS = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__",
        "__getnewargs__")  # fmt: skip
"""What a class may say of how its objects are copied."""


def duplicate(
    module: T, memo: Mapping[int, object] | None = None, hollow: Hollow | None = None
) -> T:
    """A deep copy of `module`, but for some of what model code keeps.

    Sets are shared: the copy of one may be iterated in another order, and calls made in a loop over
    it with it. So are compiled functions, which nothing changes. Of what was computed from
    parameters, the copy does not know from which. Functions that hold parts of `module` hold those
    of the copy.

    `memo` is as for `copy.deepcopy`. The copies of modules in `hollow` hold nothing.
    """
    hollow = hollow or Hollow()
    modules = [part for _, part in module.named_modules({*hollow.modules})]
    parts = [vars(part) for part in (*modules, *hollow.modules)]
    made = {id(value): new for value in _kept(parts) if (new := _instead(value)) is not None}
    copied: dict[int, Any] = {**_empty(parts), **made, **(memo or {})}
    shells = {part: type(part).__new__(type(part)) for part in hollow.modules}
    copied |= {id(part): shell for part, shell in shells.items()}
    known = {*copied, *map(id, modules)}
    _copy_parts([part for part in modules if id(part) not in copied], copied)
    out = copy.deepcopy(module, copied)
    for part, shell in shells.items():
        own = {k: v for k, v in _state(part).items() if k not in HELD}
        shell.__setstate__(_copied(own, copied) | hollow.held())
    within = {id(inner) for part in shells for inner in part.modules()} - known
    hollow.asked |= not within.isdisjoint(copied)  # other attributes led to what they hold
    for _, part, name, function in functions(out):
        vars(part)[name] = rebound(function, lambda v: copied.get(id(v), v))
    return out


@contextmanager
def duplicated(module: T, hollow: Hollow | None = None) -> Iterator[T]:
    """A duplicate of `module` to run within, and to change; it is of no use afterwards.

    Its modules refer to each other in circles, as does what is put around their forwards. That
    waits for the garbage collector, which has long to look.
    """
    out = duplicate(module, hollow=hollow)
    try:
        yield out
    finally:
        for part in [*out.modules()]:
            vars(part).clear()


def plain(module: nn.Module) -> bool:
    """Whether copies of a module are made of its attributes alone, as torch makes them."""
    return "__deepcopy__" not in vars(module) and _plain(type(module))


@cache
def _plain(made: type[nn.Module]) -> bool:
    own = any(getattr(made, way, None) is not getattr(nn.Module, way, None) for way in WAYS)
    return not own and not copyreg._slotnames(made)  # type: ignore[attr-defined]


def _copy_parts(modules: Sequence[nn.Module], copied: dict[int, Any]) -> None:
    """Put copies of modules in `copied`, as `copy.deepcopy` would, in half of the time.

    But where one has a way of its own to be copied: then it may go about the others as it likes.
    """
    if not all(map(plain, modules)):
        return
    copied |= {id(module): type(module).__new__(type(module)) for module in modules}
    for module in reversed(modules):  # what is within a module before it
        copied[id(module)].__setstate__(_copied(_state(module), copied))


def _state(module: nn.Module) -> dict[str, Any]:
    """What makes up the copy of a module that is plain."""
    return module.__reduce_ex__(4)[2]  # type: ignore[index, return-value]


def _copied(state: Mapping[str, Any], copied: dict[int, Any]) -> dict[str, Any]:
    """Copies of attributes."""
    pairs = state.items()
    return {k: v if type(v) in ATOMS else copy.deepcopy(v, copied) for k, v in pairs}


def _kept(parts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for part in parts:
        yield from (value for name, value in part.items() if name not in OWN)


def _empty(parts: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """Empty stores for those in which modules would keep hooks, tensors or parts."""
    stores = (value for part in parts for value in part.values())
    return {id(v): type(v)() for v in stores if type(v) in STORES and not v}


def _instead(value: Any) -> Any:
    if isinstance(value, (set, frozenset, torch.jit.ScriptFunction)):
        return value
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach()
    return None
