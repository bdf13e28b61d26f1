"""Modules that are copied hollow, without what they hold: they are expected not to run.

Whoever looks for what is missing while the copy runs is told off, and that is noted: the copy is
then no copy, and nothing that came of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch import nn

HELD = ("_parameters", "_buffers", "_modules")
"""Where modules keep what they hold."""


class Missing(Exception):
    """Code looks for what a hollow module does not have."""


@dataclass
class Hollow:
    """The `modules` that are copied so, and whether anybody `asked` for what they hold."""

    modules: Collection[nn.Module] = ()
    asked: bool = False
    _running: Sequence[str] = field(default=(), init=False)

    @contextmanager
    def guarded(self, running: Sequence[str]) -> Iterator[None]:
        """Within, whoever looks is told off while there are modules that are `running`."""
        self._running = running
        try:
            yield
        finally:
            self._running = ()

    def look(self) -> None:
        """Somebody looks.

        Raises:
            Missing: while a module runs.
        """
        if self._running:
            self.asked = True
            raise Missing

    def held(self) -> dict[str, Any]:
        """What a hollow module has in place of its parameters, its buffers and modules."""
        return {name: Nothing(self) for name in HELD}


class Nothing(dict[str, Any]):
    """An empty dict that tells whoever looks."""

    def __init__(self, hollow: Hollow) -> None:
        super().__init__()
        self.hollow = hollow


def is_hollow(module: nn.Module) -> bool:
    """Whether a module is a hollow copy."""
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
