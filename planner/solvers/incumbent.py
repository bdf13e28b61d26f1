"""The best assignment so far."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.solvers.problem import Problem
from shardwright.planner.solvers.tables import Vector


@dataclass
class Incumbent:
    """The best assignment so far of those within the caps on the other components."""

    problem: Problem
    caps: list[int]
    assignment: tuple[int, ...] | None = None
    cost: int = 0
    """Its component 0."""

    def offer(self, assignment: tuple[int, ...]) -> Vector | None:
        """Keep `assignment` if it is better; its costs, None where a factor forbids it."""
        price = self.problem.price(assignment)
        if price is None:
            return None
        cost, *rest = price
        within = all(c <= cap for c, cap in zip(rest, self.caps, strict=True))
        if within and (self.assignment is None or cost < self.cost):
            self.assignment, self.cost = assignment, cost
        return price
