"""Argument objects of opaque modules, such as a cache, which the module may change.

An object is searched recursively by its attributes and entries: each part has a path of keys. A run
of the module on a copy shows which tensors in it the module reads, and which parts change. The
changes are then applied to the object itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.trace.data_queries.errors import NeedsData
from shardwright.planner.trace.sizes.provenance import SourcedInt

Path = tuple[Any, ...]

NAMES = (type, Enum, FunctionType)
"""Types of values that are the same in any run."""

NOT_SEARCHED = (int, float, str, Tensor, nn.Module, torch.dtype, torch.device, *NAMES)
"""Types of values that are not searched."""


class Place(NamedTuple):
    """A part of an argument object: the number of the object and a path of keys."""

    number: int
    path: Path


class Change(NamedTuple):
    """A value that a run leaves at a place."""

    place: Place
    value: Any
    written: bool
    """Whether the tensor at the place was changed in place."""


class Objects:
    """The argument objects of one call, in order."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects
        self.parts: dict[Place, Any] = {}
        """Parts without further parts: tensors, numbers."""
        self.holders: dict[Place, Any] = {}
        self.take_stock()

    def take_stock(self) -> None:
        """Search the objects as they are now. A part in several places counts at the first one."""
        self.parts, self.holders = {}, {}
        met: set[int] = set()
        for number, value in enumerate(self.objects):
            for path, part, holds in _walk(value, (), met):
                (self.holders if holds else self.parts)[Place(number, path)] = part

    def tensors(self) -> dict[Place, Tensor]:
        """Return the tensors in the objects."""
        return {p: v for p, v in self.parts.items() if isinstance(v, Tensor)}

    def described(self, stated: Callable[[Any], Hashable]) -> Hashable:
        """Return what is known of the objects: classes of all holders, and `stated(part)` of parts.

        Raises:
            NeedsData: `stated` cannot describe a part.
        """
        kinds = tuple((place, type(v).__name__) for place, v in self.holders.items())
        return kinds, tuple((place, _said(v, stated)) for place, v in self.parts.items())

    def copied(self, tensors: Sequence[Tensor], device: torch.device) -> Objects:
        """Return copies of the objects with `tensors` in place of their tensors, on `device`.

        Raises:
            NeedsData: an object cannot be copied.
        """
        instead = zip(self.tensors().values(), tensors, strict=True)
        try:
            copies = copy.deepcopy([*self.objects], {id(t): new for t, new in instead})
        except Exception as error:  # any exception of their code
            raise NeedsData("an object among its arguments cannot be copied") from error
        out = Objects(copies)
        for place, value in out.parts.items():
            if isinstance(value, torch.device):
                out.put(Change(place, device, False))
            elif isinstance(value, SourcedInt):
                out.put(Change(place, value.plain, False))
        out.take_stock()
        return out

    def put(self, change: Change) -> None:
        """Apply a change to the objects."""
        number, path = change.place
        if change.written:
            self.parts[change.place].copy_(change.value)
            return
        holder = self.holders[Place(number, path[:-1])]
        into = holder if isinstance(holder, (dict, list)) else vars(holder)
        into[path[-1]] = change.value


class Watched(TorchFunctionMode):
    """Mode that notes which tensors of `objects` are read."""

    def __init__(self, objects: Objects) -> None:
        super().__init__()
        self.objects = objects
        self.before = dict(objects.parts)
        self.tensors = objects.tensors()
        self.versions = {place: t._version for place, t in self.tensors.items()}
        self.read: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note all tensors in the arguments. Reading a size counts as well."""
        self.read.update(map(id, tree_leaves((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))

    def touched(self) -> list[Place]:
        """Return the places of tensors that were read or written."""
        return [
            place
            for place, t in self.tensors.items()
            if id(t) in self.read or t._version != self.versions[place]
        ]

    def changes(self) -> list[Change]:
        """Return the changes of the objects since the mode was created.

        Raises:
            NeedsData: a part was removed, or a new place has more than tensors and numbers.
        """
        holders = _ids(self.objects.holders)
        self.objects.take_stock()
        if gone := self.before.keys() - self.objects.parts.keys():
            raise NeedsData(f"it takes '{min(gone).path[-1]}' out of what it is given")
        if holders != _ids(self.objects.holders):
            raise NeedsData("it puts more than tensors and numbers into what it is given")
        return list(self._changes())

    def _changes(self) -> Iterator[Change]:
        for place, now in self.objects.parts.items():
            was = self.before.get(place, self)
            if now is was:
                if isinstance(now, Tensor) and now._version != self.versions[place]:
                    yield Change(place, now, True)
            elif isinstance(now, Tensor) or isinstance(was, Tensor) or now != was:
                if isinstance(now, frozenset):
                    raise NeedsData("it changes a set in what it is given")
                yield Change(place, now, False)


def _said(part: Any, stated: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(part, (frozenset, tuple)):  # a tuple in a set
        return type(part)(_said(v, stated) for v in part)
    return part if isinstance(part, NAMES) else stated(part)


def _ids(holders: Mapping[Place, Any]) -> dict[Place, int]:
    return {place: id(holder) for place, holder in holders.items()}


def _walk(value: Any, path: Path, met: set[int]) -> Iterator[tuple[Path, Any, bool]]:
    """Yield the parts of a value, each with its path and whether it holds other parts."""
    parts: Any = None
    if isinstance(value, (set, frozenset)):
        value = frozenset(value)  # a snapshot
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, NOT_SEARCHED):
        parts = vars(value).items()
    if parts is None and not isinstance(value, Tensor):
        yield path, value, False
        return
    if id(value) in met:
        return
    met.add(id(value))
    yield path, value, parts is not None
    for key, part in [*(parts or ())]:
        yield from _walk(part, (*path, key), met)
