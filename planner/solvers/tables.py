"""Tables of rows over variables, and how two become one: what elimination and bounds work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import Any

Vector = tuple[int, ...]
Key = tuple[int, ...]
Plus = Callable[[Any, Any], Any]
"""The sum of two rows' costs."""


@dataclass
class Table:
    """Rows that are allowed over variables (ascending); `rows` gives each its costs."""

    scope: tuple[int, ...]
    rows: dict[Key, Any]


def plus(a: Vector, b: Vector) -> Vector:
    """The sum component by component."""
    return tuple(map(add, a, b))


def pick(positions: Sequence[int]) -> Callable[[Key], Key]:
    """A function from a tuple to the tuple of its elements at `positions`."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        (only,) = positions
        return lambda key: (key[only],)
    return lambda key: ()


def join(a: Table, b: Table, limit: int, plus: Plus = plus) -> Table | None:
    """Both tables as one, None where it would have more rows than `limit` and than each of them."""
    limit = max(limit, len(a.rows), len(b.rows))
    scope = tuple(sorted({*a.scope, *b.scope}))
    common = [v for v in a.scope if v in b.scope]
    extra = [v for v in b.scope if v not in a.scope]
    key_a, key_b = (pick([t.scope.index(v) for v in common]) for t in (a, b))
    if tuple(common) == b.scope:
        found = ((values, costs, b.rows.get(key_a(values))) for values, costs in a.rows.items())
        return Table(scope, {v: plus(costs, more) for v, costs, more in found if more is not None})
    rest = pick([b.scope.index(v) for v in extra])
    both = (*a.scope, *extra)
    merge = pick([both.index(v) for v in scope])
    matches: dict[Key, list[tuple[Key, Any]]] = {}
    for values, costs in b.rows.items():
        matches.setdefault(key_b(values), []).append((rest(values), costs))
    rows: dict[Key, Any] = {}
    for values, costs in a.rows.items():
        for rest_of, more in matches.get(key_a(values), ()):
            rows[merge(values + rest_of)] = plus(costs, more)
        if len(rows) > limit:
            return None
    return Table(scope, rows)
