"""Lists of numbers outside of modules, which code may index by sizes as a cache or a table.

Python indexes a list without calling a method of the integer. In a trace such lists are replaced by
ones that note it: the entry is another one for another size, so the size must not change.
"""

from __future__ import annotations

from typing import Any

from shardwright.planner.trace.sizes.provenance import SourcedInt


class NumberTable(list[Any]):
    """A list that notes by which sizes code indexes it."""

    def __getitem__(self, index: Any) -> Any:
        """Return an entry, and note the index."""
        _note(index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set an entry, and note the index."""
        _note(index)
        super().__setitem__(index, value)


def holds_numbers(value: Any) -> bool:
    """Return whether a value is a plain list of numbers (None where there are none yet).

    Or a tuple that holds one.
    """
    if type(value) is list:
        return bool(value) and all(x is None or isinstance(x, (int, float)) for x in value)
    return type(value) is tuple and any(map(holds_numbers, value))


def noting(value: Any, made: dict[int, NumberTable]) -> Any:
    """Return a value that `holds_numbers` with lists that note indexes; `made` are those by id."""
    if type(value) is tuple:
        return tuple(noting(part, made) if holds_numbers(part) else part for part in value)
    return made.setdefault(id(value), NumberTable(value))


def _note(index: Any) -> None:
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    for part in parts:
        if isinstance(part, SourcedInt):
            part.provenance.as_number(part.expression)
            part.provenance.as_lost(part.expression)
