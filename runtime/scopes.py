"""What holds in one thread only (`PerThread`), or only while some code runs (the others)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class PerThread(threading.local):
    """Variables that each thread has for itself, with the values that they begin with."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)  # in each thread, so that compiled code finds there what it sets


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value within the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def replaced(where: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module, class or object within the context, and restore them after it."""
    own = vars(where)
    before = {name: own[name] for name in values if name in own}
    try:
        for name, value in values.items():
            setattr(where, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(where, name, before[name])
            else:
                delattr(where, name)


class Patch:
    """Functions in the place of those of a module or class, while some thread is inside `active`.

    Args:
        owner: The module or class.
        functions: The new functions, by name.
    """

    def __init__(self, owner: Any, functions: Mapping[str, Any]) -> None:
        self.owner, self.functions = owner, functions
        self.originals = {name: getattr(owner, name) for name in functions}
        self.lock, self.inside = threading.Lock(), 0

    @contextmanager
    def active(self, flag: ContextVar[Any] | None = None, value: Any = None) -> Iterator[None]:
        """Inside, the functions are replaced, and `flag` has this value in this context."""
        token = None if flag is None else flag.set(value)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            if flag is not None and token is not None:
                flag.reset(token)

    def _count(self, change: int) -> None:
        with self.lock:
            self.inside += change
            for name, function in (self.functions if self.inside else self.originals).items():
                setattr(self.owner, name, function)
