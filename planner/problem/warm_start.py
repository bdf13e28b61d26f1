"""Plans to start from, by the backtracking solver, whose bounds are exact on most networks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.planner.problem.objective import Digits
from shardwright.planner.solvers import backtracking, buckets
from shardwright.planner.solvers.eliminated_again import Again
from shardwright.planner.solvers.problem import Problem, Result


@dataclass(frozen=True)
class WarmStart:
    """The network's problem in two components (`Digits.split`), solved at any price of a byte."""

    problem: Problem
    digits: Digits
    caps: Mapping[int, int]
    """Of a priced problem: its component 1 is the bytes."""
    deadline: float
    """Of `time.monotonic`: when all calls together must have ended."""
    _eliminations: list[Again] = field(default_factory=list, init=False)

    def priced(self, price: int) -> Problem:
        """The problem where a byte costs 2**price; what is capped is kept beside it."""
        return self.digits.priced(self.problem, price, bool(self.caps))

    def least(self) -> tuple[int, ...] | None:
        """The best of those that hold the fewest bytes; None if time ran out, or there is none."""
        weights = 1 + self.problem.most(1), 1
        return self._solve(self.problem.weighed([weights]), {}, None).assignment

    def fastest(self, hint: tuple[int, ...]) -> tuple[int, ...]:
        """The best where bytes cost nothing; `hint` if time ran out."""
        return self._solve(self.problem.weighed([(0, 1)]), {}, hint).assignment or hint

    def best(self, price: int, hint: tuple[int, ...]) -> Result:
        """The best where a byte costs 2**price, within the caps; `hint` if time ran out."""
        result = self._solve(self.priced(price), self.caps, hint)
        return result._replace(assignment=result.assignment or hint)

    def _solve(
        self, problem: Problem, caps: Mapping[int, int], hint: tuple[int, ...] | None
    ) -> Result:
        now = time.monotonic()
        seconds = max(self.deadline - now, 0.05)
        if caps:
            return backtracking.solve(problem, 0, caps, hint, seconds)
        middle = now + backtracking.SHARE * seconds
        return backtracking.search(self._again(middle).at(problem), [], hint, middle, now + seconds)

    def _again(self, deadline: float) -> Again:
        """How the problem is eliminated at any price, where nothing is capped."""
        if not self._eliminations:
            self._eliminations.append(Again(self.problem, buckets.ROWS, deadline))
        return self._eliminations[0]
