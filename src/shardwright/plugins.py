"""What other packages add, found through entry points; none is imported before it is asked for.

    group                   name of an entry            what it leads to
    shardwright.rules       a namespace of ops          {op: rule}, see rules/added.py
    shardwright.layers      a layer style               LayerStyle, see planner/contract/styles.py
    shardwright.solvers     solver=, --solver           Solver, see planner/solvers/problem.py
    shardwright.devices     device=, --device           a profile, see planner/devices/device.py
    shardwright.emitters    to=, --to                   Emitter, see planner/exports/exports.py

Shardwright's own are tables in those files, and come first: nobody takes a name of theirs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shardwright.errors import PluginError, ShardwrightError


def names(kind: str) -> list[str]:
    """Names in a group, given without its `shardwright.`, of all installed packages together."""
    return sorted({entry.name for entry in _entries(kind)})


def load(kind: str, name: str, package: str | None = None) -> Any:
    """What an installed package, or `package` alone, calls `name`; None where none does.

    Raises:
        PluginError: it cannot be imported, or several packages bring one; it names the package.
    """
    found = [e for e in _entries(kind) if e.name == name and package in (None, _package(e))]
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found)))
        raise PluginError(f"{packages} both bring '{name}' for shardwright.{kind}: uninstall one")
    return _loaded(found[0]) if found else None


def load_all(kind: str) -> Iterator[tuple[str, str, Any]]:
    """Package, name and thing of all in a group; a line in the log for each that does not load."""
    for entry in _entries(kind):
        try:
            yield _package(entry), entry.name, _loaded(entry)
        except PluginError as error:
            logging.getLogger("shardwright").warning("%s", error)


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _entries(kind: str) -> tuple[EntryPoint, ...]:
    return _entries_on(tuple(sys.path), f"shardwright.{kind}")


@cache
def _entries_on(_path: tuple[str, ...], group: str) -> tuple[EntryPoint, ...]:
    """All but our own, by package and name; on one path, as it takes a while."""
    found = (e for e in entry_points(group=group) if _package(e) != "shardwright")
    return tuple(sorted(found, key=lambda e: (_package(e), e.name)))


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except ShardwrightError:
        raise
    except Exception as error:  # another's code: whatever it raises while it is imported
        text = " ".join(str(error).split())
        raise PluginError(
            f"package {_package(entry)} does not load: '{entry.value}' for {entry.group}: "
            f"{type(error).__name__}: {text}; mend it or uninstall it"
        ) from error
