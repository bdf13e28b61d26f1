"""Replaces functions of torch for a time, for this thread alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from shardwright.runtime.scopes import replaced

Patch = tuple[Any, str, Callable[..., Any]]
"""A module or class, the name of a function in it, and what a thread calls instead."""


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
