"""Limits: bounds on sums of what variables take, where each takes it of a few rows only.

A cap bounds a sum over the whole problem. Memory over time is thousands of such sums, each over the
tensors that are in use at a moment, and a tensor is in use for a while: so the rows are in an
order, and what a variable takes it takes of all rows of a span. The size of this is that of the
variables, not of variables times rows, and usage is a running sum over the ends of spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple


class Use(NamedTuple):
    """A variable takes `weights[value]` of each row of `first <= row < last`; none is negative."""

    variable: int
    first: int
    last: int
    weights: tuple[int, ...]


@dataclass
class Limits:
    """Rows, each with the most that may be taken of it, and who takes of them."""

    bounds: list[int] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def usage(self, assignment: Sequence[int]) -> list[int]:
        """What is taken of each row."""
        change = [0] * (len(self.bounds) + 1)
        for variable, first, last, weights in self.uses:
            change[first] += weights[assignment[variable]]
            change[last] -= weights[assignment[variable]]
        return list(accumulate(change[:-1]))

    def hold(self, assignment: Sequence[int]) -> bool:
        """Whether no row is used more than it may be."""
        return all(u <= b for u, b in zip(self.usage(assignment), self.bounds, strict=True))

    def rows(self) -> list[list[Use]]:
        """Per row who takes of it, where these together can pass its bound; else none."""
        most = [0] * (len(self.bounds) + 1)
        for use in self.uses:
            most[use.first] += max(use.weights)
            most[use.last] -= max(use.weights)
        tight = [m > b for m, b in zip(accumulate(most[:-1]), self.bounds, strict=True)]
        out: list[list[Use]] = [[] for _ in self.bounds]
        for use in self.uses:
            for row in range(use.first, use.last):
                if tight[row]:
                    out[row].append(use)
        return out

    def add_to(self, model: Any, values: Sequence[Mapping[int, Any]]) -> None:
        """State them to a CP-SAT model, given per variable the literal of each value."""
        for row, bound in zip(self.rows(), self.bounds, strict=True):
            used = [w * values[u.variable][x] for u in row for x, w in enumerate(u.weights) if w]
            if used:
                model.add(sum(used) <= bound)
