"""Replaces attributes for a time, and functions of torch for this thread alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

Patch = tuple[Any, str, Callable[..., Any]]
"""A module or class, the name of a function in it, and what a thread calls instead."""


@contextmanager
def replaced(where: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module, class or object within the context, and restore them after it."""
    before = {name: own for name, own in vars(where).items() if name in values}
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


@contextmanager
def patched_in_this_thread(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace functions for this thread within the context, and restore them afterwards."""
    thread = get_ident()

    def here(own: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (made if get_ident() == thread else own)(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for where, name, made in patches:
            undo.enter_context(replaced(where, **{name: here(getattr(where, name), made)}))
        yield
