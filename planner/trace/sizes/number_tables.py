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


def is_of_numbers(value: Any) -> bool:
    """Return whether a value is a plain list of numbers, or of None where there are none yet."""
    filled = type(value) is list and bool(value)
    return filled and all(x is None or isinstance(x, (int, float)) for x in value)


def _note(index: Any) -> None:
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    for part in parts:
        if isinstance(part, SourcedInt):
            part.provenance.as_number(part.expression)
            part.provenance.as_lost(part.expression)
