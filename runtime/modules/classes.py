"""The class that a changed module gets: made once for each original class and use of parameters."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.runtime.code import call_sites
from shardwright.runtime.code.own_attributes import past_properties
from shardwright.runtime.modules.given_sizes import local_sizes
from shardwright.runtime.modules.local import LocalModule
from shardwright.runtime.subclasses import ITS_OWN, like, subclass_with


@functools.cache
def local_class(
    original: type, layer: str, bases: tuple[type, ...], properties: tuple[str, ...]
) -> type:
    """`bases` as one class that forwards like `original` and sees `properties` through their use.

    A class of its own only where there is something to add; else the sole base itself.
    """
    if len(bases) == 1 and not properties:
        return bases[0]
    members: dict[str, Any] = {name: _seen(name) for name in properties}
    members["forward"] = like(original, LocalModule.forward)
    members |= {kept: getattr(original, kept) for kept in ITS_OWN}
    name = layer if len(bases) == 1 else f"{layer}[{original.__name__}]"
    return type(name, bases, members)


@functools.cache
def with_local_sizes(original: type, calls: tuple[str, ...]) -> type:
    """`original` with methods that ask for local sizes where `calls` stand in their source.

    Raises:
        PlanError: the source of one does not have them.
    """
    methods: dict[str, list[str]] = {}
    for call in calls:
        methods.setdefault(call.partition(".")[0], []).append(call)
    members: dict[str, Any] = {call_sites.LOCAL_SIZES: local_sizes}
    for name, named in methods.items():
        method = call_sites.method_of(original, name)
        members[name] = method and call_sites.with_local_sizes(method, named)
        if members[name] is None:
            raise PlanError(
                f"the code of {original.__name__}.{name} is not that which the plan is for, or its "
                f"source cannot be read: it has no {', '.join(named)}; plan again"
            )
    return subclass_with(original, members)


@functools.cache
def with_own_numbers(original: type, names: tuple[str, ...]) -> type:
    """`original` whose forward reads its numbers `names` as they are, past `seen.py`; if it can."""
    forward = call_sites.method_of(original, "forward")
    reads = forward and past_properties(forward, names)
    return original if reads is None else subclass_with(original, {"forward": reads})


def _seen(name: str) -> property:
    def get(self: Any) -> Any:
        stored = self._parameters[name] if name in self._parameters else self._buffers[name]
        return None if stored is None else self._shardwright.uses[name](stored)

    return property(get, doc=f"`{name}` as this module's code sees it.")


def check_forward(module: nn.Module, path: str) -> None:
    """Raise PlanError if `module` has a forward of its own that a class cannot get in front of."""
    if "forward" in module.__dict__:
        raise PlanError(
            f"the forward of '{path}' was replaced on the instance (a hook or a kernel): "
            "apply the plan first"
        )


def calls_super(cls: type) -> bool:
    """Whether `cls.forward` hands on to its base class."""
    code = getattr(cls.forward, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and ("super" in code.co_names or "__class__" in code.co_freevars)
