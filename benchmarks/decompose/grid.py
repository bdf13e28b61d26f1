"""Factors over one or two variables as arrays: rows are made when they are asked for.

A `Row` takes some hundred bytes; a table of a large graph has millions of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.planner.solvers.problem import Factor, Row

FORBIDDEN = 2**62
"""In a grid: this choice, or pair of choices, is not allowed."""


class Grid(Factor):
    """A factor of one component: `table[values]` is what a row costs, in 64 bits."""

    def __init__(self, name: str, scope: Sequence[int], table: np.ndarray[Any, Any]) -> None:
        self.name, self.scope, self.table = name, tuple(scope), table

    @property
    def rows(self) -> list[Row]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rows that are allowed."""
        at = np.argwhere(self.table < FORBIDDEN)
        costs = self.table[tuple(at.T)].tolist()
        return [Row(tuple(v), (c,)) for v, c in zip(at.tolist(), costs, strict=True)]

    def row(self, values: tuple[int, ...]) -> Row | None:
        """The row with these values, None where there is none."""
        cost = int(self.table[values])
        return Row(values, (cost,)) if cost < FORBIDDEN else None
