"""Hollow modules: copies without parameters, buffers and submodules, which should not run.

An access to the missing contents while the copy runs raises `Missing` and is noted: results of the
copy are then invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch import nn

from shardwright.runtime.scopes import replaced

HELD = ("_parameters", "_buffers", "_modules")
"""Attributes in which modules keep parameters, buffers and submodules."""


class Missing(Exception):
    """Code accessed the missing contents of a hollow module."""


@dataclass
class Hollow:
    """The `modules` to copy hollow, and whether code `asked` for their contents."""

    modules: Collection[nn.Module] = ()
    asked: bool = False
    _running: Sequence[str] = field(default=(), init=False)

    def guarded(self, running: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which accesses raise while the list `running` is not empty."""
        return replaced(self, _running=running)

    def look(self) -> None:
        """Note an access.

        Raises:
            Missing: a module runs.
        """
        if self._running:
            self.asked = True
            raise Missing

    def held(self) -> dict[str, Any]:
        """Return the replacements for parameters, buffers and submodules of a hollow module."""
        return {name: Nothing(self) for name in HELD}


class Nothing(dict[str, Any]):
    """An empty dict that reports each access to `hollow`."""

    def __init__(self, hollow: Hollow) -> None:
        super().__init__()
        self.hollow = hollow


def is_hollow(module: nn.Module) -> bool:
    """Return whether a module is a hollow copy."""
    return isinstance(vars(module)["_modules"], Nothing)


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def look(self: Nothing, *args: Any, **kwargs: Any) -> Any:
        self.hollow.look()
        return method(self, *args, **kwargs)

    return look


for _name in (
    *("__contains__", "__getitem__", "__iter__", "__reversed__", "__len__", "__eq__", "__or__"),
    *("__ror__", "__setitem__", "__delitem__", "__ior__", "get", "items", "keys", "values", "copy"),
    *("pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(Nothing, _name, _looking(getattr(dict, _name)))
