"""Caches of a split model, as those see them who call it: nobody takes a rank's part for the whole.

What ranks put into a cache is what they get back: keys and values of their own heads. Between two
calls of the model each object in a cache that holds tensors has a class in front of its own, that
does not hand these out or in, and lets methods (`crop`, `reorder_cache`) do what they do on this
rank's part. Within a call it has its own class, so that nothing there takes longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.runtime.slots import is_own, leaves, named

OWNER = "_shardwright_filled_by"
"""The attribute by which an object in a cache knows the model that filled it."""

OWN = "_shardwright_own"
"""The attribute by which a class in front knows the own one."""

PART = (
    "a cache of a split model holds what this rank computes with, its heads, and no rank has all: "
    "take keys, values and states from the unsplit model"
)


class Caches:
    """The caches that one model, and copies of it, fill.

    Args:
        names: Arguments that take them, and outputs that give them.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self.compiled = False
        """Whether a call was compiled: such calls leave what they put into a cache as it is."""

    def open(self, given: Iterable[Any]) -> AbstractContextManager[list[Any]]:
        """Within, which is a call, code sees what is in the caches `given`.

        Gives what is hidden when it ends: them, and the outputs that are added.

        Raises:
            UsageError: another model filled one.
        """
        if torch.compiler.is_compiling():
            self.compiled = True
            return nullcontext([])
        return self._open(given) if self.names else nullcontext([])

    @contextmanager
    def _open(self, given: Iterable[Any]) -> Iterator[list[Any]]:
        known = [value for value in given if value is not None]
        opened: list[tuple[Any, type]] = []
        for holder in (h for value in known for h in _holders(value)):
            kind = type(holder)
            if vars(holder).get(OWNER, self if self.compiled else None) is not self:
                raise UsageError(
                    f"this {kind.__name__} was filled by another model, whose heads lie otherwise "
                    "over the ranks: let this model fill a cache of its own"
                )
            if OWN in vars(kind):
                opened.append((holder, kind))
        for holder, kind in opened:
            holder.__class__ = vars(kind)[OWN]
        try:
            yield known
        finally:
            for holder, kind in opened:
                holder.__class__ = kind
            left = {id(value): value for value in known}.values()
            for holder in (h for value in left for h in _holders(value)):
                if OWN not in vars(type(holder)):
                    vars(holder)[OWNER] = self
                    names = (n for n, v in vars(holder).items() if _holds(v))
                    holder.__class__ = _sealed(type(holder), frozenset(names))

    def among(self, output: Any) -> Iterator[Any]:
        """The caches that a call gave out."""
        by_name = named(output) or {}
        return (by_name[name] for name in self.names if name in by_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        return self


def _holders(value: Any) -> Iterator[Any]:
    """The objects in a cache, itself maybe, that have tensors as attributes or in containers."""
    if OWN in vars(type(value)):
        yield value
        return
    if not is_own(value) or not hasattr(value, "__dict__"):
        return
    for part in vars(value).values():
        if isinstance(part, (list, tuple, dict)):
            for each in part.values() if isinstance(part, dict) else part:
                yield from _holders(each)
        elif not isinstance(part, Tensor):
            yield from _holders(part)
    if any(_holds(part) for part in vars(value).values()):
        yield value


def _holds(value: Any) -> bool:
    """Whether a value is a real tensor, or a container of some."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict)):
        return any(isinstance(x, Tensor) and x.is_floating_point() for x in parts)
    return isinstance(value, Tensor) and value.is_floating_point()


@functools.cache
def _sealed(own: type, names: frozenset[str]) -> type:
    """`own` without the attributes `names`, and with methods that work on them all the same."""
    members: dict[str, Any] = {name: _hidden(name) for name in names}
    for name in dir(own):
        method = getattr(own, name)
        if not name.startswith("__") and isinstance(method, FunctionType):
            members[name] = _locally(method)
    for name in ("__doc__", "__module__", "__qualname__"):
        members[name] = getattr(own, name)
    return type(own)(own.__name__, (_front(own), own), {**members, OWN: own})


def _front(own: type) -> type:
    """A class for in front of `own`, which is not told of it: it might list its subclasses.

    Its objects are laid out alike, so that those of one class may become those of the other.
    """
    first: Any = own  # that has a place for attributes
    while first.__base__.__dictoffset__:
        first = first.__base__
    members = {"__init_subclass__": classmethod(lambda cls, **_: None)}
    return type(first)("Sealed", (first.__base__,), members)


def _hidden(name: str) -> property:
    def get(self: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__dict__[name]
        raise UsageError(f"'{name}': {PART}")

    def put(self: Any, value: Any) -> None:
        if not torch.compiler.is_compiling():
            raise UsageError(f"'{name}': {PART}")
        self.__dict__[name] = value

    return property(get, put, doc=f"`{name}`, of this rank.")


def _locally(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` on this rank's part; it takes and gives no real tensors."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        _check(method, (args, kwargs))
        kind = type(self)
        self.__class__ = vars(kind)[OWN]
        try:
            found = method(self, *args, **kwargs)
        finally:
            self.__class__ = kind
        _check(method, found)
        return found

    return wrapper


def _check(method: Callable[..., Any], value: Any) -> None:
    if any(isinstance(x, Tensor) and x.is_floating_point() for _, x in leaves(value)):
        raise UsageError(f"{method.__qualname__}: {PART}")
