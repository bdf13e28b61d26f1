"""Snapshots of module attributes and of containers in them, to restore their contents later."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from operator import is_
from typing import Any

from torch import nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.code.model_objects import CODE, HARMLESS, LARGEST, OF_TORCH, is_config

CONTAINERS = (list, dict, set, deque)

MAX_CONTAINERS = 10_000
"""The most containers and objects of a model that a snapshot covers."""

NOT_KEPT = OF_TORCH | HARMLESS | {"forward"}
"""Attributes that are not state of a module."""


class KeptContents:
    """Snapshot of the attributes of all modules of `root`, with containers and objects in them."""

    def __init__(self, root: nn.Module) -> None:
        self._attributes = [(m, _plain_ones(m)) for m in root.modules()]
        held = [v for m in root.modules() for k, v in vars(m).items() if k not in OF_TORCH]
        self._contents = Contents(held)

    def changed(self) -> bool:
        """Return whether attributes or contents are others now."""
        return (
            any(_differs(_plain_ones(module), before) for module, before in self._attributes)
            or self._contents.changed()
        )

    def restore(self) -> None:
        """Restore the attributes and contents."""
        for module, before in self._attributes:
            now = vars(module)
            for name in _plain_ones(module).keys() - before.keys():
                del now[name]
            now.update(before)
        self._contents.restore()


class Contents:
    """Snapshot of the containers and objects among `values`, recursively."""

    def __init__(self, values: list[Any]) -> None:
        found = _within(values)
        self._empty = [v for v in found if type(v) in CONTAINERS and not v]
        """Empty containers: most are the attributes of functions. One call tells whether all still
        are empty."""
        self._before = [(v, _copied(v)) for v in found if type(v) not in CONTAINERS or v]

    def changed(self) -> bool:
        """Return whether a container or object holds something else now."""
        return any(self._empty) or any(_differs(_contents(v), b) for v, b in self._before)

    def now_other(self) -> list[Any]:
        """Return what the containers and objects that changed hold now."""
        changed = [now for v, b in self._before if _differs(now := _contents(v), b)]
        changed += filter(None, self._empty)
        return [x for now in changed for x in (now.values() if isinstance(now, dict) else now)]

    def entries(self, wanted: Callable[[Any], bool]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
        """Yield the entries that are wanted, each with a function that sets it."""
        for value, before in self._before:
            now = _contents(value)
            items = before.items() if isinstance(before, dict) else enumerate(before)
            for key, part in items if not isinstance(now, set) else ():
                if wanted(part):
                    yield part, partial(_kind(now).__setitem__, now, key)

    def restore(self) -> None:
        """Restore the contents."""
        for value in filter(None, self._empty):
            value.clear()
        for value, before in self._before:
            _restore(value, before)


def _plain_ones(module: nn.Module) -> dict[str, Any]:
    return {name: v for name, v in vars(module).items() if name not in NOT_KEPT}


def _within(values: list[Any]) -> list[Any]:
    """Return the containers and objects among `values`, recursively; at most `MAX_CONTAINERS`."""
    found: dict[int, Any] = {}
    todo = list(values)
    while todo and len(found) < MAX_CONTAINERS:
        value = todo.pop()
        if id(value) in found or not (type(value) in CONTAINERS or _may_change(value)):
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


def _may_change(value: Any) -> bool:
    return not (is_plain(value) or isinstance(value, CODE) or is_config(value))


def _copied(value: Any) -> Any:
    """Return a copy of the contents of a container or object, bypassing overrides of its class."""
    if type(value) in CONTAINERS:
        return value.copy()
    if not isinstance(value, CONTAINERS):
        return dict(vars(value))
    kind = _kind(value)
    if isinstance(value, dict):
        return {key: dict.__getitem__(value, key) for key in kind.__iter__(value)}
    return kind(kind.__iter__(value))


def _restore(value: Any, before: Any) -> None:
    """Restore the contents of `value` if they differ from `before`."""
    now = _contents(value)
    if not _differs(now, before):
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


def _contents(value: Any) -> Any:
    return value if isinstance(value, CONTAINERS) else vars(value)


def _differs(now: Any, before: Any) -> bool:
    if type(now) is dict and type(before) is dict:  # most are
        same = len(now) == len(before) and all(map(is_, now, before))
        return not (same and all(map(is_, now.values(), before.values())))
    if isinstance(now, set) and now == before:
        return False  # filling it again could change its iteration order
    fewer = _kind(now).__len__(now) != len(before)  # its class may say something else
    return fewer or not all(map(is_, _parts(now), _parts(before)))


def _kind(value: Any) -> Any:
    """Return the builtin class that a container is an instance of."""
    kind = type(value)
    if kind in CONTAINERS:
        return kind
    return next(kind for kind in (OrderedDict, *CONTAINERS) if isinstance(value, kind))


def _parts(value: Any) -> Iterable[Any]:
    parts = _kind(value).__iter__(value)
    return chain(parts, dict.values(value)) if isinstance(value, dict) else parts
