"""Defines the objective: least time plus priced bytes, then fewest redistributions, then names.

Without a price of bytes the fastest plan on a fast link replicates everything. So a byte gets a
price (see `optimize.py`). With a price instead of a hard cap equal layers get equal placements (a
cap makes a knapsack of them). Ties are broken by lower digits of the same number, not by a second
solve under a cap on the first: measured on 2 layers of a dense decoder, 0.2 s against more than
30 s. Conventions (`conventions.py`) are not part of the objective: they restrict what solvers may
choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.planner.problem.builder import ACTIONS, BACKWARD, BYTES, COMPONENTS, TIE, TIME
from shardwright.planner.solvers.problem import CostVector, Problem

FORWARD_WEIGHT = 16
"""A nanosecond of `TIME` counts as much as this many of `BACKWARD`."""
BYTES_ALONE = [int(c == BYTES) for c in range(len(COMPONENTS))]
"""Weights of a network's components that select the bytes."""
BYTE_PRICES = range(-16, 24)
"""Powers of two: at price p a byte costs 2**p / FORWARD_WEIGHT nanoseconds."""


def byte_price_ns(price: int) -> float:
    """Return the price of a byte in nanoseconds. It is a power of two, so exact."""
    return 2.0**price / FORWARD_WEIGHT


def weighed_time(costs: CostVector) -> int:
    """Return `TIME` and `BACKWARD` as one number, in 1/FORWARD_WEIGHT nanoseconds."""
    return FORWARD_WEIGHT * costs[TIME] + costs[BACKWARD]


def primary(costs: CostVector, price: int) -> int:
    """Return time plus bytes at 2**price, as an integer: times 2**-price if price is negative."""
    return (weighed_time(costs) << max(-price, 0)) + (costs[BYTES] << max(price, 0))


@dataclass(frozen=True)
class Digits:
    """Packs time, redistributions and names into one number. Each has room for its largest sum."""

    names: int
    below: int
    """The room of redistributions and names together."""

    @classmethod
    def of(cls, problem: Problem) -> Digits:
        """Return the digits of a network's problem."""
        names = 1 + problem.most(TIE)
        return cls(names, names * (1 + problem.most(ACTIONS)))

    def weights(self, time: int, size: int = 0) -> list[int]:
        """Return the weights of the components of a network's problem.

        Args:
            time: Weight of a nanosecond of `BACKWARD`, in multiples of `below`.
            size: Weight of a byte, in multiples of `below`.
        """
        weight = {BYTES: size, TIME: FORWARD_WEIGHT * time, BACKWARD: time}
        ties = {ACTIONS: self.names, TIE: 1}
        return [weight.get(c, 0) * self.below + ties.get(c, 0) for c in range(len(COMPONENTS))]

    def bytes_and_rest(self, problem: Problem) -> Problem:
        """Return a network's problem in two components: bytes, and everything else."""
        return problem.weighed([BYTES_ALONE, self.weights(1 << -BYTE_PRICES.start)])

    def byte_weight(self, price: int) -> int:
        """Return the price of a byte in the units of the second component of `bytes_and_rest`."""
        return self.below << (price - BYTE_PRICES.start)


def question(problem: Problem, price: int, capped: bool) -> Problem:
    """Return the problem for a solver, which minimises its component 0.

    Args:
        problem: The problem of a network, as built or presolved.
        price: A byte costs 2**price.
        capped: Whether there is a cap on bytes; they are then component 1.
    """
    digits = Digits.of(problem)
    cost = digits.weights(1 << max(-price, 0), 1 << max(price, 0))
    return replace(problem.weighed([cost, BYTES_ALONE][: 1 + capped]), ties=digits.below)
