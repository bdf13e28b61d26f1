"""What the best plan is: least time and priced bytes, then fewest changes, then names.

Left to itself the fastest plan on a fast link replicates everything. So a byte gets a price
(`optimize.py` says which), and with a price instead of a hard cap equal layers come out alike (a
cap makes a knapsack of them). Ties are broken in the same number by lower digits, not by a second
solve under a cap on the first: measured on 2 layers of a dense decoder, 0.2 s against more than
30 s. What a convention settles (`conventions.py`) is no part of it: solvers see only what that
allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.planner.problem.builder import ACTIONS, BACKWARD, BYTES, COMPONENTS, TIE, TIME
from shardwright.planner.solvers.problem import CostVector, Problem

FORWARD_WEIGHT = 16
"""A nanosecond of the forward pass counts as much as this many of the backward pass."""
BYTES_ALONE = [int(c == BYTES) for c in range(len(COMPONENTS))]
"""Weights of a network's components."""
BYTE_PRICES = range(-16, 24)
"""Powers of two: at price p a byte costs 2**p / FORWARD_WEIGHT nanoseconds."""


def byte_price_ns(price: int) -> float:
    """What a byte costs at one of `BYTE_PRICES`, in nanoseconds: a power of two, so exact."""
    return 2.0**price / FORWARD_WEIGHT


def weighed_time(costs: CostVector) -> int:
    """The times of both passes, in parts of a nanosecond of the forward pass."""
    return FORWARD_WEIGHT * costs[TIME] + costs[BACKWARD]


def primary(costs: CostVector, price: int) -> int:
    """Time plus bytes at 2**price, in the largest unit that makes a whole number of it."""
    return (weighed_time(costs) << max(-price, 0)) + (costs[BYTES] << max(price, 0))


@dataclass(frozen=True)
class Digits:
    """How time, changes and names are put into one number: each has room for its largest sum."""

    names: int
    below: int
    """What changes and names take together."""

    @classmethod
    def of(cls, problem: Problem) -> Digits:
        """The digits of a network's problem."""
        names = 1 + problem.most(TIE)
        return cls(names, names * (1 + problem.most(ACTIONS)))

    def weights(self, time: int, size: int = 0) -> list[int]:
        """Weights of the components of a network's problem.

        Args:
            time: Of a nanosecond of the backward pass, in multiples of `below`.
            size: Of a byte, likewise.
        """
        weight = {BYTES: size, TIME: FORWARD_WEIGHT * time, BACKWARD: time}
        ties = {ACTIONS: self.names, TIE: 1}
        return [weight.get(c, 0) * self.below + ties.get(c, 0) for c in range(len(COMPONENTS))]

    def bytes_and_rest(self, problem: Problem) -> Problem:
        """A network's problem in two components: bytes, and all else, whatever a byte costs."""
        return problem.weighed([BYTES_ALONE, self.weights(1 << -BYTE_PRICES.start)])

    def byte_weight(self, price: int) -> int:
        """What a byte costs where all else is as in `bytes_and_rest`."""
        return self.below << (price - BYTE_PRICES.start)


def question(problem: Problem, price: int, capped: bool) -> Problem:
    """What a solver is asked for a network's problem: to minimise component 0 of this one.

    Args:
        problem: Of a network, as it was built or presolved.
        price: A byte costs 2**price.
        capped: Whether there is a cap on bytes, which are component 1 then.
    """
    digits = Digits.of(problem)
    cost = digits.weights(1 << max(-price, 0), 1 << max(price, 0))
    return replace(problem.weighed([cost, BYTES_ALONE][: 1 + capped]), ties=digits.below)
