"""Problems with limits: bounds on sums over variables, each of which takes part in a few only.

A cap bounds a sum over the whole problem. Memory over time is thousands of such sums, each over the
tensors that are in use at a moment, and a tensor is in use for a while: so the rows are in an
order, and what a variable takes it takes of all rows of a span. The size of this is that of the
variables, not of variables times rows, and usage is a running sum over the ends of spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import CostVector, Problem


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


@dataclass
class LimitedProblem(Problem):
    """A problem with limits besides its factors."""

    limits: Limits = field(default_factory=Limits)

    def accept(self, answer: Sequence[int], caps: Mapping[int, int] | None = None) -> CostVector:
        """Costs of an assignment that a solver returned.

        Raises:
            SolverError: a factor, a cap or a limit forbids it.
        """
        if not self.limits.hold(answer):
            raise SolverError("the solver returned an assignment that its problem's limits forbid")
        return super().accept(answer, caps)
