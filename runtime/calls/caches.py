"""Caches of a split model, as those see them who call it: nobody takes a rank's part for the whole.

What ranks put into a cache is what they get back: keys and values of their own heads. Between two
calls of the model each object in a cache that holds tensors has a class in front of its own, that
hands these out as what nobody can compute with (`cached_part.py`), takes none in, and lets methods
(`crop`, `reorder_cache`) do what they do on this rank's part. Within a call it has its own class,
so that nothing there takes longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.runtime.calls.cached_part import PART, shown
from shardwright.runtime.slots import is_own, leaves, named
from shardwright.runtime.subclasses import subclass_with

OWNER = "_shardwright_filled_by"
"""The attribute by which an object in a cache knows the model that filled it."""

OWN = "_shardwright_own"
"""The attribute by which a class in front knows the own one."""

SEEN = "_shardwright_seen"
"""The attribute by which a cache knows where what is hidden was when it was hidden."""


Marks = list[tuple[int, type]]


class Caches:
    """The caches that one model, and copies of it, fill.

    Args:
        names: Arguments that take those which the plan is proven for, and outputs that give them.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self.compiled = False
        """Whether a call was compiled: such calls leave what they put into a cache as it is."""

    def open(
        self, given: Iterable[Any], compiling: bool
    ) -> AbstractContextManager[list[Any] | None]:
        """Within, which is a call, code sees what is in the caches `given`.

        Gives what is hidden when it ends: them, and the outputs that are added. None where one is
        `compiling`: dynamo cannot go on with a list of a context behind a break of its graph.

        Raises:
            UsageError: another model filled one.
        """
        if compiling:
            self.compiled = True
            return nullcontext()
        return _Open(self, [v for v in given if v is not None])

    @contextmanager
    def closed(self, *values: Any) -> Iterator[None]:
        """Within, in a call, it is hidden what is in caches among `values`: of a hook, say."""
        found = [] if torch.compiler.is_compiling() else [*_own(values)]
        for value in found:
            self.hide(value)
        try:
            yield
        finally:
            for value in found:
                self.show(value)

    @contextmanager
    def opened(self, *values: Any) -> Iterator[None]:
        """Within, in a call in which they are hidden, caches among `values` are seen."""
        found = [*_own(values)]
        for value in found:
            self.show(value)
        try:
            yield
        finally:
            for value in found:
                self.hide(value)

    def show(self, value: Any) -> list[Sealed]:
        """Let code see what is in a cache; gives what was hidden."""
        seen = vars(value).get(SEEN) if hasattr(value, "__dict__") else None
        if seen is not None and seen.by is self and seen.still():
            found = seen.sealed
        else:
            found = [Sealed(h, type(h)) for h in _Walk(value).holders if self._hides(h)]
        for holder, kind in found:
            holder.__class__ = vars(kind)[OWN]
        return found

    def _hides(self, holder: Any) -> bool:
        """Whether it is hidden what is in there.

        Raises:
            UsageError: by another model.
        """
        kind = type(holder)
        if vars(holder).get(OWNER, self if self.compiled else None) is not self:
            raise UsageError(
                f"this {kind.__name__} was filled by another model, whose heads lie otherwise "
                "over the ranks: let this model fill a cache of its own"
            )
        return OWN in vars(kind)

    def hide(self, value: Any) -> None:
        """Hide what is in a cache, and note where that is."""
        walk = _Walk(value)
        for holder in walk.holders:
            if OWN not in vars(type(holder)):
                vars(holder)[OWNER] = self
                names = (n for n, v in vars(holder).items() if _holds(v))
                holder.__class__ = _sealed(type(holder), frozenset(names))
        if hasattr(value, "__dict__") and not any(holder is value for holder in walk.holders):
            sealed = [Sealed(holder, type(holder)) for holder in walk.holders]
            vars(value)[SEEN] = _Seen(self, walk.containers, walk.inside, sealed)

    def among(self, output: Any, takes: Container[str]) -> Iterator[Any]:
        """The caches that a call gave out: state of its own that it `takes`, by the argument.

        Whatever steps the plan is proven for: in others, too, a rank has its heads.
        """
        found = (named(output) or {}).items()
        return (v for name, v in found if name in self.names or (name in takes and is_own(v)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        return self


def _own(values: Iterable[Any]) -> Iterator[Any]:
    """Objects of classes of one's own, as caches are, in `values` and in containers among these."""
    for value in values:
        if is_own(value) and hasattr(value, "__dict__"):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _own(value)
        elif (by_name := named(value)) is not None:
            yield from _own(by_name.values())


class Sealed(NamedTuple):
    """An object in a cache, and its class while it is hidden what is in there."""

    holder: Any
    kind: type


class _Open:
    """A call that is given caches."""

    def __init__(self, caches: Caches, given: list[Any]) -> None:
        self.caches, self.known = caches, given
        self.shown: list[Sealed] = []

    def __enter__(self) -> list[Any]:
        for value in self.known:
            self.shown += self.caches.show(value)
        return self.known

    def __exit__(self, *_: object) -> None:
        for holder, kind in self.shown:
            holder.__class__ = kind
        for value in dict(zip(map(id, self.known), self.known, strict=True)).values():
            seen = vars(value).get(SEEN) if hasattr(value, "__dict__") else None
            if seen is None or seen.by is not self.caches or not seen.still():
                self.caches.hide(value)


@dataclass
class _Seen:
    """What was hidden in a cache, and where: a step finds it there again, and need not look."""

    by: Caches
    containers: list[tuple[dict[str, Any], str, Any, Marks]]
    """Attributes with containers or further objects: all of the object, name, value, and in it."""
    inside: list[Any]
    """What is in these, but for tensors: while it is there nothing else gets its id."""
    sealed: list[Sealed]

    def still(self) -> bool:
        """Whether all is as it was: nothing came or went, and what was hidden is."""
        for variables, name, value, parts in self.containers:
            if variables.get(name) is not value or _marks(value) != parts:
                return False
        return not [holder for holder, kind in self.sealed if type(holder) is not kind]


class _Walk:
    """The objects in a cache, itself maybe, that have tensors as attributes or in containers.

    Attributes:
        holders: They.
        containers, inside: The other attributes on the way to them: see `_Seen`.
    """

    def __init__(self, value: Any) -> None:
        self.holders: list[Any] = []
        self.containers: list[tuple[dict[str, Any], str, Any, Marks]] = []
        self.inside: list[Any] = []
        self._visit(value)

    def _visit(self, value: Any) -> None:
        hidden = OWN in vars(type(value))
        if not hidden and (not is_own(value) or not hasattr(value, "__dict__")):
            return
        for name, part in vars(value).items():
            if name in (SEEN, OWNER) or isinstance(part, Tensor):
                continue
            if isinstance(part, (list, tuple, dict)) or is_own(part):
                self.containers.append((vars(value), name, part, _marks(part)))
                self.inside += [x for x in _parts(part) if not isinstance(x, Tensor)]
            for each in _parts(part) if isinstance(part, (list, tuple, dict)) else (part,):
                self._visit(each)
        if hidden or any(_holds(part) for name, part in vars(value).items() if name != SEEN):
            self.holders.append(value)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _marks(value: Any) -> Marks:
    """What is in a container, each told by its id and its type."""
    return [*zip(map(id, _parts(value)), map(type, _parts(value)), strict=True)]


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
    return subclass_with(own, {**members, OWN: own}, _front(own))


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
        value = self.__dict__[name]
        return value if torch.compiler.is_compiling() else shown(value, vars(type(self))[OWN])

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
