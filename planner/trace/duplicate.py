"""Copies of modules whose code does the same in the same order."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.runtime.closures import OWN, functions, rebound

T = TypeVar("T", bound=nn.Module)

ATOMS = frozenset((type(None), bool, int, float, str))
"""Types of values that are their own copies: most of what modules keep."""
STORES = frozenset((dict, OrderedDict, set))


def duplicate(module: T, memo: Mapping[int, object] | None = None) -> T:
    """A deep copy of `module`, but for some of what model code keeps.

    Sets are shared: the copy of one may be iterated in another order, and calls made in a loop over
    it with it. So are compiled functions, which nothing changes. Of what was computed from
    parameters, the copy does not know from which. Functions that hold parts of `module` hold those
    of the copy.

    `memo` is as for `copy.deepcopy`.
    """
    modules = [*module.modules()]
    parts = [vars(part) for part in modules]
    made = {id(value): new for value in _kept(parts) if (new := _instead(value)) is not None}
    copied: dict[int, Any] = {**_empty(parts), **made, **(memo or {})}
    _copy_parts([part for part in modules if id(part) not in copied], copied)
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


def _copy_parts(modules: Sequence[nn.Module], copied: dict[int, Any]) -> None:
    """Put copies of modules in `copied`, as `copy.deepcopy` would, in half of the time.

    But where one has a way of its own to be copied: then it may go about the others as it likes.
    """
    if any(hasattr(module, "__deepcopy__") for module in modules):
        return
    states: list[tuple[Any, Any]] = []
    for module in modules:
        how = module.__reduce_ex__(4)
        make, arguments, state, *more = how if isinstance(how, tuple) else (None, (), None)
        if make is copyreg.__newobj__ and arguments == (type(module),) and not any(more):  # type: ignore[attr-defined]
            copied[id(module)] = new = make(*arguments)
            states.append((new, state))
    for new, state in reversed(states):  # what is within a module before it
        if type(state) is dict:
            pairs = state.items()
            state = {k: v if type(v) in ATOMS else copy.deepcopy(v, copied) for k, v in pairs}
        else:
            state = copy.deepcopy(state, copied)
        new.__setstate__(state)


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
