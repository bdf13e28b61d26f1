"""The configs, other objects, lists and dicts that a model keeps, with snapshots of their content.

Nothing reports changes to their content, so the root compares them at each call. Lists, dicts and
sets are compared if they hold only plain values and code reads them; objects other than configs, if
they hold only plain values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, repeat
from operator import ne
from typing import Any, NamedTuple

from torch import nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.code.attributes import PREFIX
from shardwright.runtime.code.model_objects import CODE, DEEPEST, LARGEST, is_config, may_change

CONTAINERS = (list, dict, set)


class KeptObject(NamedTuple):
    """An object that a model keeps: its path, the object, and a snapshot of its content."""

    path: str
    kept: Any
    before: Any

    @property
    def now(self) -> Any:
        """The current content."""
        return self.kept if type(self.kept) in CONTAINERS else vars(self.kept)


class KeptObjects:
    """All objects that a model keeps, in columns: comparing them needs no Python loop."""

    def __init__(self, every: Iterable[KeptObject]) -> None:
        self.every = [*every]
        containers = [one for one in self.every if type(one.kept) in CONTAINERS]
        others = [one for one in self.every if type(one.kept) not in CONTAINERS]
        self.containers, self.were = [c.kept for c in containers], [c.before for c in containers]
        self.others, self.had = [c.kept for c in others], [c.before for c in others]

    def changed(self) -> bool:
        """Whether the content of any of them differs from its snapshot."""
        tables = map(object.__getattribute__, self.others, repeat("__dict__"))
        try:
            return any(map(ne, self.containers, self.were)) or any(map(ne, tables, self.had))
        except (TypeError, ValueError, RuntimeError):  # a tensor was put into one
            return True


def snapshot(content: Any) -> Any:
    """A copy of a container or table; containers that hold other than plain values are shared."""
    if not isinstance(content, Mapping):
        return _copied(content)
    return {name: _copied(value) for name, value in content.items()}


def kept_objects(model: nn.Module, is_read: Callable[[str], bool]) -> Iterator[KeptObject]:
    """The objects that modules of `model` keep, each once.

    Args:
        model: The model.
        is_read: Whether code reads an attribute of this name.
    """
    found: set[int] = set()
    for path, module in model.named_modules():
        own: dict[str, Any] = vars(module)
        full: dict[str, Any] = getattr(own.get("_shardwright"), "full_values", {})
        for name, value in [*own.items(), *full.items()]:
            if not may_change(name) and not name.startswith(PREFIX):
                yield from _within(value, f"{path}.{name}".lstrip("."), is_read, found)


def _within(
    value: Any, path: str, is_read: Callable[[str], bool], found: set[int]
) -> Iterator[KeptObject]:
    """The object at `path`, and the objects in it."""
    if id(value) in found or isinstance(value, CODE):
        return
    found.add(id(value))
    if type(value) in CONTAINERS:
        if is_read(path.rpartition(".")[2]) and _is_plain_throughout(value):
            yield KeptObject(path, value, snapshot(value))
    elif is_config(value) or _is_of_plain_values(value):
        yield KeptObject(path, value, snapshot(vars(value)))
        for name, one in list(vars(value).items()):
            if not is_plain(one) and type(one) not in CONTAINERS and not may_change(name):
                yield from _within(one, f"{path}.{name}", is_read, found)


def _is_of_plain_values(value: Any, depth: int = 0) -> bool:
    """Whether `value` is an object with only plain values, also in objects that it holds."""
    if is_plain(value) or isinstance(value, CODE) or not getattr(value, "__dict__", None):
        return False
    return depth < DEEPEST and all(
        _is_plain_throughout(one) or _is_of_plain_values(one, depth + 1)
        for one in vars(value).values()
    )


def _is_plain_throughout(value: Any) -> bool:
    """Whether `value` is a plain value, or a container of few enough plain values."""
    leaves = list(islice(_leaves(value), LARGEST + 1))
    return len(leaves) <= LARGEST and all(map(is_plain, leaves))


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    if type(value) not in (*CONTAINERS, tuple, frozenset) or depth == DEEPEST:
        yield value
        return
    for one in value.values() if type(value) is dict else value:
        yield from _leaves(one, depth + 1)


def _copied(value: Any) -> Any:
    plain = type(value) in CONTAINERS and _is_plain_throughout(value)
    return copy.deepcopy(value) if plain else value
