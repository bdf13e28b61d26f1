"""Replaces functions of torch for this thread alone: other threads call torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any


@contextmanager
def patched_in_this_thread(
    patches: Sequence[tuple[Any, str, Callable[..., Any]]],
) -> Iterator[None]:
    """Replace functions within the context, and restore them afterwards.

    Args:
        patches: Module or class, name of a function in it, what this thread calls instead.
    """
    thread = get_ident()

    def here(own: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (made if get_ident() == thread else own)(*args, **kwargs)

        return call

    before = [getattr(where, name) for where, name, _ in patches]
    for (where, name, made), own in zip(patches, before, strict=True):
        setattr(where, name, here(own, made))
    try:
        yield
    finally:
        for (where, name, _), own in zip(patches, before, strict=True):
            setattr(where, name, own)
