"""Seals the caches of a split model, so that no code mistakes local keys and values for full ones.

Between two calls of the model a cache is sealed. Its class is then a subclass that neither returns
nor takes tensors, and whose methods (`crop`, `reorder_cache`) run on local tensors. Objects in the
cache are sealed when they are read. During a call a cache has its own class, so nothing is slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.names import PAGED_CACHES, taken_as
from shardwright.runtime.slots import is_own, leaves, named
from shardwright.runtime.subclasses import subclass_with

OWNER = "_shardwright_filled_by"
"""The attribute of a cache with the `Caches` of the model that filled it."""

OWN = "_shardwright_own"
"""The attribute of a sealed class with the original class."""

READ = "_shardwright_read"
"""The attribute of a sealed object with the objects in it that were read, and so sealed."""

PART = (
    "a cache of a split model holds what this rank computes with, its heads, and no rank has all: "
    "take keys, values and states from the unsplit model (if generate() raised this, call it "
    "without return_dict_in_generate, which hands out the cache of each sample)"
)

SIMPLE = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, type, FunctionType}
)


class Caches:
    """The caches that one model and its copies fill.

    Args:
        names: The arguments and outputs that are caches in the calls of the plan.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self.compiled = False
        """Whether a call was compiled. Compiled calls do not seal caches."""

    def open(self, given: Iterable[Any]) -> list[Any]:
        """Unseal the caches among the arguments of a call; returns those to seal when it ends.

        Paged caches are never sealed: continuous batching manages them between calls.

        Raises:
            UsageError: another model filled one of them.
        """
        if torch.compiler.is_compiling():
            self.compiled = True
            return []
        opened = []
        for value in given:
            kind = type(value)
            if value is not None and _is_object(value) and kind.__name__ not in PAGED_CACHES:
                if value.__dict__.get(OWNER) is self:
                    if OWN not in kind.__dict__ and not self.compiled:
                        continue  # an enclosing call has opened it
                    _unseal(value)
                else:
                    self._take(value)
                opened.append(value)
        return opened

    def _take(self, value: Any) -> None:
        """Unseal a cache that this model has not marked yet, and all objects in it.

        Raises:
            UsageError: it holds tensors of another model.
        """
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
        """Seal caches when a call ends, and note that this model filled them."""
        if torch.compiler.is_compiling():
            return
        for value in values:
            value.__dict__[OWNER] = self
            _seal(value)

    @contextmanager
    def sealed(self, *values: Any) -> Iterator[None]:
        """Inside, caches among `values` are sealed, during a call: for a hook, for example."""
        found = [*_objects(values)]
        self.seal(found)
        try:
            yield
        finally:
            for value in found:
                _unseal(value)

    def new_among(self, output: Any, takes: Container[str]) -> list[Any]:
        """The caches in an output that are new: an enclosing call still uses the others.

        A cache has a known name, or is of a custom class and among the arguments.

        Args:
            output: What the model returned.
            takes: The names of its arguments.
        """
        found = []
        for name, value in (named(output) or {}).items():
            known = name in self.names or taken_as(name, takes) in takes
            if known and _is_object(value) and type(value).__name__ not in PAGED_CACHES:
                found += [value] if value.__dict__.get(OWNER) is not self else []
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        return self


def _is_object(value: Any) -> bool:
    """Whether `value` is sealed, or an object of a custom class, as caches are."""
    return OWN in type(value).__dict__ or (is_own(value) and hasattr(value, "__dict__"))


def _objects(values: Iterable[Any]) -> Iterator[Any]:
    """The objects of custom classes in `values`, also in containers."""
    for value in values:
        if _is_object(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _objects(value)
        elif (by_name := named(value)) is not None:
            yield from _objects(by_name.values())


def _parts(value: Any) -> Collection[Any]:
    """The values in a container; for anything else, itself."""
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
    """A sealed subclass of `own`.

    Args:
        own: The class of a cache, or of an object in one.
        names: The attributes that may hold tensors.
    """
    members: dict[str, Any] = {name: _sealed_attribute(name) for name in names}
    for name in dir(own):
        method = getattr(own, name)
        if not name.startswith("__") and isinstance(method, FunctionType):
            members[name] = _on_this_part(method)
        elif not name.startswith("__") and isinstance(method, property) and name not in members:
            members[name] = _property_on_this_part(name, method)
    return subclass_with(own, {**members, "__reduce_ex__": _reduced, OWN: own}, _front(own))


def _reduced(self: Any, protocol: Any) -> Any:
    """How `copy` makes another one. `pickle`, which writes down what makes it, is refused."""
    own: Any = getattr(self, OWN)
    make, *rest = own.__reduce_ex__(self, protocol)
    return (_NotWritten(make), *rest)


class _NotWritten(functools.partial[Any]):
    """A function that can be called and not pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(f"a cache cannot be pickled or sent: {PART}")


def _front(own: type) -> type:
    """A base for sealed subclasses of `own`: `own.__init_subclass__` is not called for them.

    That method might register its subclasses. The base has the same memory layout as `own`, so that
    `__class__` of an object can be set to the subclass and back.
    """
    first: Any = own  # the first class with a `__dict__`
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


class SealedDict(Mapping[Any, Any]):
    """A dict of a sealed object, read-only: each entry is checked when it is read."""

    def __init__(self, entries: dict[Any, Any], read: Callable[[Any], Any]) -> None:
        self._entries, self._read = entries, read

    def __getitem__(self, key: Any) -> Any:
        return self._read(self._entries[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read(value: Any, holder: Any, name: str) -> Any:
    """The value of an attribute of a sealed object, with containers made read-only.

    Raises:
        UsageError: it is or contains a floating-point tensor.
    """
    if type(value) in SIMPLE:
        return value
    if _is_real(value):
        raise UsageError(f"'{name}': {PART}")
    if isinstance(value, dict):
        return SealedDict(value, lambda each: _read(each, holder, name))
    if isinstance(value, (list, tuple)):
        # Each token reads some: a list is quicker than a generator, and flags need no look.
        return tuple([v if type(v) in SIMPLE else _read(v, holder, name) for v in value])
    if _is_object(value):
        read = holder.__dict__.setdefault(READ, [])
        if not any(value is each for each in read):
            read.append(value)
        _seal(value)
    return value


def _on_this_part(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `method` of a sealed object: it runs unsealed; float tensors are refused."""

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


def _property_on_this_part(name: str, own: property) -> property:
    """Let the getter of a property run unsealed; what it returns is sealed as if it were read.

    Guards of compiled code read properties: the objects that a getter only looks at must keep their
    classes, or the code compiles anew.
    """

    def get(self: Any) -> Any:
        getter: Any = own.fget
        if torch.compiler.is_compiling():
            return getter(self)
        _unseal(self)
        try:
            found = getter(self)
        finally:
            _seal(self)
        return _read(found, self, name)

    return property(get, own.fset, own.fdel, own.__doc__)


def _check(method: Callable[..., Any], value: Any) -> None:
    if any(_is_real(x) for _, x in leaves(value)):
        raise UsageError(f"{method.__qualname__}: {PART}")
