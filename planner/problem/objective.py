"""What the best plan is: least time and priced bytes, then fewest changes, then names.

Left to itself the fastest plan on a fast link replicates everything. So a byte gets a price
(`byte_price.py` says which), and with a price instead of a hard cap equal layers come out alike (a
cap makes a knapsack of them).
Ties are broken in the same number by lower digits, not by a second solve under a cap on the first:
measured on 2 layers of a dense decoder, 0.2 s against more than 30 s. All but the bytes is one
number whatever the price is: so what does not hang on the price is decided once, by bucket
elimination. What a convention settles (`conventions.py`) is no part of it: solvers see only what it
allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.planner.problem.builder import ACTIONS, BACKWARD, BYTES, TIE, TIME
from shardwright.planner.solvers.problem import CostVector, Factor, Problem, Row
from shardwright.planner.solvers.reduction import Reduction

FORWARD_WEIGHT = 16
"""A nanosecond of the forward pass counts as much as this many of the backward pass."""
BYTE_PRICES = range(-16, 24)
"""Powers of two: at price p a byte costs 2**p / FORWARD_WEIGHT nanoseconds."""


def byte_price_ns(price: int) -> float:
    """What a byte costs at one of `BYTE_PRICES`, in nanoseconds: a power of two, so exact."""
    return 2.0**price / FORWARD_WEIGHT


def primary(costs: CostVector, price: int) -> int:
    """Time plus bytes at 2**price, in the largest unit that makes a whole number of it."""
    spent = FORWARD_WEIGHT * costs[TIME] + costs[BACKWARD]
    return (spent << max(-price, 0)) + (costs[BYTES] << max(price, 0))


@dataclass(frozen=True)
class Fitted(Reduction):
    """A priced problem in smaller numbers: `unit` of them stand for `worth` of the old ones.

    What is less than a unit stays as it is.
    """

    unit: int
    worth: int

    def lift(self, bound: int) -> int:
        """The old costs that are proven with `bound`."""
        whole, rest = divmod(bound, self.unit)
        return whole * self.worth + rest


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

    def split(self, problem: Problem) -> Reduction:
        """The network's problem in two components: bytes, and all else."""
        time = self.below << -BYTE_PRICES.start
        rest = {TIME: FORWARD_WEIGHT * time, BACKWARD: time, ACTIONS: self.names, TIE: 1}
        size = {BYTES: 1}
        count = range(len(problem.components))
        weights = [tuple(w.get(c, 0) for c in count) for w in (size, rest)]
        return Reduction(problem.weighed(weights))

    def weights(self, price: int) -> CostVector:
        """Weights of bytes and of all else where a byte costs 2**price."""
        return self.below << (price - BYTE_PRICES.start), 1

    def guess(self, least: CostVector, fastest: CostVector) -> int:
        """A price at which a plan is about as small as the smallest, from the two extremes' costs.

        At the price that the extremes differ by, plans between them pay; the last bytes are dearer.
        """
        spent = self.spent(least[1] - fastest[1])
        saved = max(fastest[0] - least[0], 1)
        return spent.bit_length() - saved.bit_length() + 2

    def spent(self, rest: int) -> int:
        """Time, in what a byte costs at price 0, of all that a plan costs but bytes."""
        return rest // (self.below << -BYTE_PRICES.start)

    def first(self, cost: int, price: int) -> int:
        """The primary objective of a priced sum of costs."""
        return (cost // self.below) >> (min(price, 0) - BYTE_PRICES.start)

    def priced(self, problem: Problem, price: int, capped: bool) -> Problem:
        """A problem of two components (`split`) where a byte costs 2**price, in one.

        Args:
            problem: In bytes and all else.
            price: One of `BYTE_PRICES`.
            capped: Whether bytes are kept beside it, as component 1.
        """
        weights = [self.weights(price), (1, 0)]
        return problem.weighed(weights[: 1 + capped])

    def fit(self, problem: Problem, price: int) -> Fitted:
        """A priced problem (its component 0 is) in numbers as small as can be."""

        def digits(cost: int) -> int:
            return self.first(cost, price) * self.below + cost % self.below

        out = replace(problem.without_factors(problem.components), ties=self.below)
        for f in problem.factors:
            rows = [Row(r.values, (digits(r.costs[0]), *r.costs[1:])) for r in f.rows]
            out.factors.append(Factor(f.name, f.scope, rows))
        return Fitted(out, self.below, self.below << (min(price, 0) - BYTE_PRICES.start))


def question(problem: Problem, price: int, capped: bool) -> Problem:
    """What is asked of a solver for a network's problem: to minimise component 0 of this one.

    Args:
        problem: Of a network, as it was built or presolved.
        price: A byte costs 2**price.
        capped: Whether there is a cap on bytes, which are component 1 then.
    """
    digits = Digits.of(problem)
    priced = digits.priced(digits.split(problem).problem, price, capped)
    return digits.fit(priced, price).problem
