"""The names that code has: of what it reads, calls and asks for by a string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType


def names_in(codes: Iterable[CodeType]) -> Iterator[str]:
    """Every name, and every string, in these, and in functions within them."""
    for code in codes:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, CodeType):
                yield from names_in([constant])
