"""What is in attributes of modules, and in what they hold, to be put back as it was."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain, islice
from operator import is_
from typing import Any

from torch import nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.code.model_objects import CODE, HARMLESS, LARGEST, OF_TORCH, is_config

CONTAINERS = (list, dict, set, deque)

MOST = 10_000
"""Lists, tables and objects of a model that are looked at."""

NOT_KEPT = OF_TORCH | HARMLESS | {"forward"}
"""Attributes that are no state of a module."""


class KeptContents:
    """What lists, tables and objects of `root` hold, and its plain attributes."""

    def __init__(self, root: nn.Module) -> None:
        self._attributes = [(m, _plain_ones(m)) for m in root.modules()]
        held = [v for m in root.modules() for k, v in vars(m).items() if k not in OF_TORCH]
        self._contents = Contents(held)

    def restore(self) -> None:
        """Have them hold that again."""
        for module, before in self._attributes:
            now = vars(module)
            for name in _plain_ones(module).keys() - before.keys():
                del now[name]
            now.update(before)
        self._contents.restore()


class Contents:
    """What lists, tables and objects among `values` hold, and those in them."""

    def __init__(self, values: list[Any]) -> None:
        self._before = [(value, _copied(value)) for value in _within(values)]

    def restore(self) -> None:
        """Have them hold that again."""
        for value, before in self._before:
            _restore(value, before)


def _plain_ones(module: nn.Module) -> dict[str, Any]:
    return {name: v for name, v in vars(module).items() if name not in NOT_KEPT}


def _within(values: list[Any]) -> list[Any]:
    """Lists, tables and objects among `values`, and those in them."""
    found: dict[int, Any] = {}
    todo = list(values)
    while todo and len(found) < MOST:
        value = todo.pop()
        if id(value) in found or is_plain(value) or isinstance(value, CODE) or is_config(value):
            continue
        if isinstance(value, CONTAINERS):
            found[id(value)] = value
            todo += islice(dict.values(value) if isinstance(value, dict) else value, LARGEST)
        elif isinstance(value, tuple):
            todo += islice(value, LARGEST)
        elif type(value).__dictoffset__ and isinstance(value.__dict__, dict):
            found[id(value)] = value
            todo += vars(value).values()
    return [*found.values()]


def _copied(value: Any) -> Any:
    """What is in a list, a table or an object, past what its class makes of it."""
    if not isinstance(value, CONTAINERS):
        return dict(vars(value))
    kind = _kind(value)
    if isinstance(value, dict):
        return {key: dict.__getitem__(value, key) for key in kind.__iter__(value)}
    return kind(kind.__iter__(value))


def _restore(value: Any, before: Any) -> None:
    """Put back what was in it, if that is no more."""
    now = value if isinstance(value, CONTAINERS) else vars(value)
    if isinstance(now, set) and now == before:
        return  # it may be iterated in another order, once it is filled again
    if len(now) == len(before) and all(map(is_, _parts(now), _parts(before))):
        return
    kind = _kind(now)
    kind.clear(now)
    if isinstance(now, dict):
        for key, part in before.items():
            kind.__setitem__(now, key, part)
    elif isinstance(now, set):
        set.update(now, before)
    else:
        kind.extend(now, before)


def _kind(value: Any) -> Any:
    """The class of Python's that a container is of."""
    return next(kind for kind in (OrderedDict, *CONTAINERS) if isinstance(value, kind))


def _parts(value: Any) -> Iterable[Any]:
    return chain(value, dict.values(value)) if isinstance(value, dict) else value
