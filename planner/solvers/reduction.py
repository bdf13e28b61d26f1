"""Reductions: problems made smaller or put in other numbers, each with the way there and back.

A step takes a problem and gives a reduction of it, or None where it finds that no assignment
satisfies the problem. Steps taken one after another are a chain, which is a reduction too: hints go
down through it, assignments and bounds come back up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from shardwright.planner.solvers.problem import Problem, Result, Solver


@dataclass(frozen=True)
class Reduction:
    """What was made of a problem; this one has the same variables and values, at other costs."""

    problem: Problem

    def contract(self, assignment: Sequence[int]) -> tuple[int, ...] | None:
        """What an assignment of the old problem is here; None if it is lost."""
        return tuple(assignment)

    def expand(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the old problem that one of `problem` stands for."""
        return tuple(assignment)

    def lift(self, bound: int) -> int:
        """The bound on component 0 of the old problem that one on that of `problem` gives."""
        return bound


Step = Callable[[Problem], Reduction | None]
"""Reduces a problem; None where no assignment satisfies it."""


@dataclass(frozen=True)
class Chain(Reduction):
    """Reductions one after another, as one."""

    parts: tuple[Reduction, ...]

    def contract(self, assignment: Sequence[int]) -> tuple[int, ...] | None:
        """What an assignment of the old problem is at the end; None if it is lost on the way."""
        found: Sequence[int] | None = assignment
        for part in self.parts:
            found = None if found is None else part.contract(found)
        return None if found is None else tuple(found)

    def expand(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the old problem that one of `problem` stands for."""
        for part in reversed(self.parts):
            assignment = part.expand(assignment)
        return tuple(assignment)

    def lift(self, bound: int) -> int:
        """The bound on component 0 of the old problem that one on that of `problem` gives."""
        for part in reversed(self.parts):
            bound = part.lift(bound)
        return bound


@overload
def chain(problem: Problem, *steps: Callable[[Problem], Reduction]) -> Chain: ...
@overload
def chain(problem: Problem, *steps: Step) -> Chain | None: ...
def chain(problem: Problem, *steps: Step) -> Chain | None:
    """Take steps one after another; None where one of them finds that nothing satisfies it."""
    parts: list[Reduction] = []
    for step in steps:
        part = step(problem)
        if part is None:
            return None
        parts.append(part)
        problem = part.problem
    return Chain(problem, tuple(parts))


def solve_reduced(
    problem: Problem,
    steps: Sequence[Step],
    solve: Solver,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise component 0 by a solver that sees only what `steps` leave of the problem.

    The steps must leave the components under `caps` as they are.

    Raises:
        SolverError: the solver's answer breaks a factor or a cap.
    """
    end = time.monotonic() + seconds
    small = chain(problem, *steps)
    if small is None:
        return Result("infeasible", None, 0)
    first = None if hint is None else small.contract(hint)
    result = solve(small.problem, 0, caps, first, max(end - time.monotonic(), 0.05))
    result = result._replace(bound=small.lift(result.bound))
    if result.assignment is None:
        return result
    small.problem.accept(result.assignment, caps)
    return result._replace(assignment=small.expand(result.assignment))
