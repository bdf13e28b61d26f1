"""Caches of a split model: nobody takes the keys and values of a rank's heads for those of all.

Between two calls of the model a cache is sealed: its class is one in front of its own that refuses
to hand out tensors and takes none in, and whose methods (`crop`, `reorder_cache`) do what they do
on this rank's part. Objects in it are sealed when somebody reads them. Within a call a cache has
its own class, so that nothing there takes longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.runtime.slots import is_own, leaves, named
from shardwright.runtime.subclasses import subclass_with

OWNER = "_shardwright_filled_by"
"""The attribute by which a cache knows the model that filled it."""

OWN = "_shardwright_own"
"""The attribute by which a class in front knows the own one."""

READ = "_shardwright_read"
"""The attribute of a sealed object for objects in it that are sealed, too, as they were read."""

PART = (
    "a cache of a split model holds what this rank computes with, its heads, and no rank has all: "
    "take keys, values and states from the unsplit model"
)

SIMPLE = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, type, FunctionType}
)


class Caches:
    """The caches that one model, and copies of it, fill.

    Args:
        names: Arguments that take those which the plan is proven for, and outputs that give them.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self.compiled = False
        """Whether a call was compiled: such calls leave what they put into a cache as it is."""

    def open(self, given: Iterable[Any]) -> list[Any]:
        """Unseal those caches that a call is `given`: what is to be sealed when it ends.

        Raises:
            UsageError: another model filled one.
        """
        if torch.compiler.is_compiling():
            self.compiled = True
            return []
        opened = []
        for value in given:
            if value is not None and _is_object(value):
                if value.__dict__.get(OWNER) is self:
                    if OWN not in type(value).__dict__ and not self.compiled:
                        continue  # it is open in a call around
                    _unseal(value)
                else:
                    self._take(value)
                opened.append(value)
        return opened

    def _take(self, value: Any) -> None:
        """Unseal a cache that no call of this model had yet, and all that is in it."""
        ours = value.__dict__.get(OWNER, self if self.compiled else None) is self
        parts = [x for name, v in value.__dict__.items() if name != READ for x in _parts(v)]
        if not ours and any(map(_is_real, parts)):
            raise UsageError(
                f"this {type(value).__name__} was filled by another model, whose heads are laid "
                "out differently over the ranks: let this model fill a cache of its own"
            )
        _unseal(value)
        for x in parts:
            if x is not self and _is_object(x):
                self._take(x)

    def seal(self, values: Iterable[Any]) -> None:
        """Seal caches that a call leaves; what is in no call of the plan is left alone."""
        if torch.compiler.is_compiling():
            return
        for value in values:
            if _is_object(value):
                value.__dict__[OWNER] = self
                _seal(value)

    @contextmanager
    def sealed(self, *values: Any) -> Iterator[None]:
        """Within, in a call, caches among `values` are sealed: for a hook, say."""
        found = [] if torch.compiler.is_compiling() else [*_objects(values)]
        self.seal(found)
        try:
            yield
        finally:
            for value in found:
                _unseal(value)

    def new_among(self, output: Any, takes: Container[str]) -> list[Any]:
        """Those that no call had yet: of a call within another, which goes on with the others."""
        return [v for v in self.among(output, takes) if getattr(v, OWNER, None) is not self]

    def among(self, output: Any, takes: Container[str]) -> list[Any]:
        """The caches that a call gave out: state of its own that it `takes`, by the argument.

        Whatever steps the plan is proven for: in others, too, a rank has its heads.
        """
        found = []
        for name, value in (named(output) or {}).items():
            if name in self.names or (name in takes and is_own(value)):
                found.append(value)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        return self


def _is_object(value: Any) -> bool:
    """Whether it is an object of a class of its own, as caches are."""
    return OWN in type(value).__dict__ or (is_own(value) and hasattr(value, "__dict__"))


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    """Such objects in `values`, and in containers among these."""
    for value in values:
        if _is_object(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _objects(value)
        elif (by_name := named(value)) is not None:
            yield from _objects(by_name.values())


def _parts(value: Any) -> Collection[Any]:
    """What is in a container; of anything else, itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _seal(value: Any) -> None:
    kind = type(value)
    if OWN in kind.__dict__:
        return
    names = []
    for name, part in value.__dict__.items():
        if type(part) not in SIMPLE and name not in (OWNER, READ):
            names.append(name)
    value.__class__ = _sealed_class(kind, tuple(names))
    for part in value.__dict__.get(READ, ()):
        _seal(part)


def _unseal(value: Any) -> None:
    own = type(value).__dict__.get(OWN)
    if own is not None:
        value.__class__ = own
    for part in value.__dict__.get(READ, ()):
        _unseal(part)


@functools.lru_cache(maxsize=256)
def _sealed_class(own: type, names: tuple[str, ...]) -> type:
    """`own` whose attributes `names` are refused where they are tensors, and whose methods work."""
    members: dict[str, Any] = {name: _sealed_attribute(name) for name in names}
    for name in dir(own):
        method = getattr(own, name)
        if not name.startswith("__") and isinstance(method, FunctionType):
            members[name] = _on_this_part(method)
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


def _sealed_attribute(name: str) -> property:
    def get(self: Any) -> Any:
        value = self.__dict__[name]
        return value if torch.compiler.is_compiling() else _read(value, self, name)

    def put(self: Any, value: Any) -> None:
        if not torch.compiler.is_compiling():
            raise UsageError(f"'{name}': {PART}")
        self.__dict__[name] = value

    return property(get, put, doc=f"`{name}`, of this rank.")


def _read(value: Any, holder: Any, name: str) -> Any:
    """What is shown of an attribute of a sealed object: no tensors, and nothing to write into."""
    if _is_real(value):
        raise UsageError(f"'{name}': {PART}")
    if isinstance(value, dict):
        return MappingProxyType({key: _read(each, holder, name) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_read(each, holder, name) for each in value)
    if _is_object(value):
        read = holder.__dict__.setdefault(READ, [])
        if not any(value is each for each in read):
            read.append(value)
        _seal(value)
    return value


def _on_this_part(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a sealed object on this rank's part; it takes and gives no real tensors."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        for value in (*args, *kwargs.values()):
            if type(value) not in SIMPLE:
                _check(method, value)
        _unseal(self)
        try:
            found = method(self, *args, **kwargs)
        finally:
            _seal(self)
        if type(found) not in SIMPLE:
            _check(method, found)
        return found

    return wrapper


def _check(method: Callable[..., Any], value: Any) -> None:
    if any(_is_real(x) for _, x in leaves(value)):
        raise UsageError(f"{method.__qualname__}: {PART}")
