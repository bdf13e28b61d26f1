"""Copy modules so that code of the copy does the same in the same order."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.planner.trace.model.skeletons import HELD, Hollow
from shardwright.runtime.code.closures import OWN, functions, rebound

T = TypeVar("T", bound=nn.Module)

ATOMS = frozenset((type(None), bool, int, float, str))
"""Types of values that need no copy. Most attributes of modules have these types."""
STORES = frozenset((dict, OrderedDict, set))
WAYS = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__",
        "__getnewargs__")  # fmt: skip
"""Methods by which a class may change how its objects are copied."""


def duplicate(
    module: T, memo: Mapping[int, object] | None = None, hollow: Hollow | None = None
) -> T:
    """Return a deep copy of `module`, with some exceptions.

    Sets in attributes are shared, because a copy may iterate in another order, which would change
    the order of calls in loops over it. TorchScript functions are shared, because nothing changes
    them. Tensors computed from parameters are detached. Functions that refer to parts of `module`
    refer to those of the copy.

    Args:
        module: The module.
        memo: As for `copy.deepcopy`.
        hollow: Modules whose copies hold nothing.
    """
    hollow = hollow or Hollow()
    modules = [part for _, part in module.named_modules({*hollow.modules})]
    parts = [vars(part) for part in (*modules, *hollow.modules)]
    kept = (value for part in parts for name, value in part.items() if name not in OWN)
    made = {id(value): new for value in kept if (new := _instead(value)) is not None}
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
    hollow.asked |= not within.isdisjoint(copied)  # reached by other attributes
    places: list[tuple[dict[Any, Any], Any]] = [(vars(m), name) for _, m, name, _ in functions(out)]
    for m in out.modules():
        before, behind = m._forward_pre_hooks, m._forward_hooks
        hooks = (before, behind, m._backward_pre_hooks, m._backward_hooks)
        places += [(table, key) for table in hooks for key in table]
    for table, key in places:
        if isinstance(table[key], FunctionType) and table[key].__closure__:
            table[key] = rebound(table[key], lambda v: copied.get(id(v), v))
    return out


@contextmanager
def duplicated(module: T, hollow: Hollow | None = None) -> Iterator[T]:
    """Context manager that yields a duplicate of `module`, which is emptied at the end.

    Its modules and their wrapped forwards form reference cycles. Without this they would have to
    wait for the garbage collector, which is slow.
    """
    out = duplicate(module, hollow=hollow)
    try:
        yield out
    finally:
        for part in [*out.modules()]:
            vars(part).clear()


def plain(module: nn.Module) -> bool:
    """Return whether a module is copied by its attributes alone, as `nn.Module` is."""
    return "__deepcopy__" not in vars(module) and _plain(type(module))


@cache
def _plain(made: type[nn.Module]) -> bool:
    own = any(getattr(made, way, None) is not getattr(nn.Module, way, None) for way in WAYS)
    return not own and not copyreg._slotnames(made)  # type: ignore[attr-defined]


def _copy_parts(modules: Sequence[nn.Module], copied: dict[int, Any]) -> None:
    """Add copies of modules to `copied`, as `copy.deepcopy` would, in half of the time.

    Does nothing if a module customizes copying, because it may then affect the other modules.
    """
    if not all(map(plain, modules)):
        return
    copied |= {id(module): type(module).__new__(type(module)) for module in modules}
    for module in reversed(modules):  # submodules before the modules around them
        copied[id(module)].__setstate__(_copied(_state(module), copied))


def _state(module: nn.Module) -> dict[str, Any]:
    """Return the state from which a plain module is copied."""
    return module.__reduce_ex__(4)[2]  # type: ignore[index, return-value]


def _copied(state: Mapping[str, Any], copied: dict[int, Any]) -> dict[str, Any]:
    """Return copies of attributes."""
    pairs = state.items()
    return {k: v if type(v) in ATOMS else copy.deepcopy(v, copied) for k, v in pairs}


def _empty(parts: Iterable[Mapping[str, Any]]) -> dict[int, Any]:
    """Map the ids of empty containers in attributes to new empty containers."""
    stores = (value for part in parts for value in part.values())
    return {id(v): type(v)() for v in stores if type(v) in STORES and not v}


def _instead(value: Any) -> Any:
    if isinstance(value, (set, frozenset, torch.jit.ScriptFunction)):
        return value
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach()
    return None
