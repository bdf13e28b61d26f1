"""Configs, other objects, lists and dicts that a model keeps: what was in them when it was split.

Nothing tells when what is in them changes, so the root compares them at each call. Of lists and
objects those matter that hold plain values alone, and that code asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, repeat
from operator import ne
from typing import Any, NamedTuple

from torch import nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.code.copied import OWN
from shardwright.runtime.code.model_objects import CODE, DEEPEST, LARGEST, is_config, may_change

CONTAINERS = (list, dict, set)


class KeptObject(NamedTuple):
    """Something that a model keeps: where, the object, and what was in it."""

    path: str
    kept: Any
    before: Any

    @property
    def now(self) -> Any:
        """What is in it."""
        return self.kept if type(self.kept) in CONTAINERS else vars(self.kept)


class KeptObjects:
    """All that a model keeps, in columns: no Python runs for each where they are compared."""

    def __init__(self, every: Iterable[KeptObject]) -> None:
        self.every = [*every]
        containers = [one for one in self.every if type(one.kept) in CONTAINERS]
        others = [one for one in self.every if type(one.kept) not in CONTAINERS]
        self.containers, self.were = [c.kept for c in containers], [c.before for c in containers]
        self.others, self.had = [c.kept for c in others], [c.before for c in others]

    def changed(self) -> bool:
        """Whether something else is in one of them."""
        tables = map(object.__getattribute__, self.others, repeat("__dict__"))
        try:
            return any(map(ne, self.containers, self.were)) or any(map(ne, tables, self.had))
        except (TypeError, ValueError, RuntimeError):  # of tensors that came into one
            return True


def snapshot(content: Any) -> Any:
    """A copy of a list, or of a table and the lists in it, as far as they hold plain values."""
    if not isinstance(content, Mapping):
        return _copied(content)
    return {name: _copied(value) for name, value in content.items()}


def kept_objects(model: nn.Module, asks: Callable[[str], bool]) -> Iterator[KeptObject]:
    """What modules of a model keep, of which code `asks` by name; each once."""
    found: set[int] = set()
    for path, module in model.named_modules():
        own: dict[str, Any] = vars(module)
        full: dict[str, Any] = getattr(own.get("_shardwright"), "full_values", {})
        for name, value in [*own.items(), *full.items()]:
            if not may_change(name) and not name.startswith(OWN):
                yield from _within(value, f"{path}.{name}".lstrip("."), asks, found)


def _within(
    value: Any, path: str, asks: Callable[[str], bool], found: set[int]
) -> Iterator[KeptObject]:
    """What is kept at `path`, and in it."""
    if id(value) in found or isinstance(value, CODE):
        return
    found.add(id(value))
    if type(value) in CONTAINERS:
        if asks(path.rpartition(".")[2]) and _is_plain_throughout(value):
            yield KeptObject(path, value, snapshot(value))
    elif is_config(value) or _is_of_plain_values(value):
        yield KeptObject(path, value, snapshot(vars(value)))
        for name, one in list(vars(value).items()):
            if not is_plain(one) and type(one) not in CONTAINERS and not may_change(name):
                yield from _within(one, f"{path}.{name}", asks, found)


def _is_of_plain_values(value: Any, depth: int = 0) -> bool:
    """Whether it is an object whose attributes are plain values, and such objects."""
    if is_plain(value) or isinstance(value, CODE) or not getattr(value, "__dict__", None):
        return False
    return depth < DEEPEST and all(
        _is_plain_throughout(one) or _is_of_plain_values(one, depth + 1)
        for one in vars(value).values()
    )


def _is_plain_throughout(value: Any) -> bool:
    """Whether it is a plain value, or has but such in it, and not too many."""
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
