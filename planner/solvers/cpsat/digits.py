"""Sums of any size in the 64 bits of CP-SAT: written in digits, with carries, exactly.

A sum that is small enough is an expression as it stands. Of others what breaks ties alone is a sum
of its own. If that does not do, each cost is written in digits of a base B, and so is the sum: what
the digits of one place add up to is a digit of the sum and B times a carry to the next. The first
place has no end. So two sums are compared by their places, the first one first: to minimise a sum
is to minimise its places in turn, and a cap on it is the sum of these costs and of what is left
under the cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

from shardwright.planner.solvers.cpsat.model import PartModel

BITS = 50
"""Sums of no more bits are written as they stand: floats of the linear relaxation can tell them."""
DIGIT, ROOM = 50, 61
"""A digit has no more bits, and what the digits of one place add up to no more than `ROOM`."""


class Sum(NamedTuple):
    """Costs of literals: `least` is what all assignments pay, `terms` what some pay beyond."""

    least: int
    unit: int
    """Costs are counted in these: no smaller difference is possible."""
    terms: list[tuple[Any, int]]
    """Literals, and units."""

    @property
    def most(self) -> int:
        """All terms together."""
        return sum(weight for _, weight in self.terms)

    @property
    def digits(self) -> tuple[int, int]:
        """How many places the sum has, and bits of a digit."""
        size = self.most.bit_length()
        if size <= BITS:
            return 1, BITS
        count = -(-size // min(DIGIT, ROOM - len(self.terms).bit_length()))
        return count, -(-size // count)


class Place(NamedTuple):
    """A part of a sum, and what one of it stands for there: more than all places below."""

    expression: Any
    worth: int


def sum_of(model: PartModel, component: int, part: Callable[[int], int] = int) -> Sum:
    """What a component of a problem adds up to, or a `part` of each of its costs."""
    least, found = 0, []
    for factor, literals in zip(model.problem.factors, model.rows, strict=True):
        costs = [part(row.costs[component]) for row in factor.rows]
        low = min(costs)
        least += low
        pairs = zip(literals, costs, strict=True)
        found += [(literal, cost - low) for literal, cost in pairs if cost > low]
    unit = gcd(*(cost for _, cost in found)) or 1
    return Sum(least, unit, [(literal, cost // unit) for literal, cost in found])


def places(model: PartModel, component: int) -> tuple[int, list[Place]]:
    """A component's least sum, and what a sum is beyond that, the first place first."""
    whole, name = sum_of(model, component), model.problem.components[component]
    ties = model.problem.ties if component == 0 else 1
    most = sum(max(r.costs[component] % ties for r in f.rows) for f in model.problem.factors)
    if whole.digits[0] == 1 or not 0 < most < ties:
        return whole.least, _places(model, whole, name)
    first = sum_of(model, component, lambda cost: cost // ties)
    rest = sum_of(model, component, lambda cost: cost % ties)
    above = [place._replace(worth=ties * place.worth) for place in _places(model, first, name)]
    below = _places(model, rest, f"{name} ties")
    return ties * first.least + rest.least, above + below


def _places(model: PartModel, total: Sum, name: str) -> list[Place]:
    """The places of a sum; each but the first is below the base."""
    count, bits = total.digits
    first, rest = _carried(model, total.terms, bits, [(1 << bits) - 1] * (count - 1), name)
    places = enumerate([*rest, first])
    return [Place(found, total.unit << k * bits) for k, found in places][::-1]


def limit(model: PartModel, total: Sum, cap: int, name: str) -> bool:
    """Keep a sum below a cap or at it; False where no assignment does."""
    room = (cap - total.least) // total.unit
    if room < 0:
        return False
    for literal, weight in total.terms:
        if weight > room:
            model.model.add(literal == 0)
    total = total._replace(terms=[(t, weight) for t, weight in total.terms if weight <= room])
    if total.most <= room:
        return True
    count, bits = total.digits
    digits = []
    for _ in range(count - 1):
        digits.append(room % (1 << bits))
        room >>= bits
    first, _ = _carried(model, total.terms, bits, digits, name)
    model.model.add(first <= room)
    return True


def _carried(
    model: PartModel, terms: list[tuple[Any, int]], bits: int, highest: Sequence[int], name: str
) -> tuple[Any, list[Any]]:
    """The first place of a sum, and integers for those below, the last one first.

    Args:
        model: Gets the integers and what they are.
        terms: Literals and their costs.
        bits: Of a digit.
        highest: The largest digit of each place but the first; the least is a base below.
        name: Of the integers.
    """
    base, out = 1 << bits, []
    carry, largest = model.model.new_constant(0), 0
    for place, high in enumerate(highest):
        here = [(literal, weight % base) for literal, weight in terms]
        terms = [(literal, weight // base) for literal, weight in terms]
        low = high - base + 1
        largest = (sum(weight for _, weight in here) + largest - low) // base
        digit = model.model.new_int_var(low, high, f"{name} digit {place}")
        onward = model.model.new_int_var(0, largest, f"{name} carry {place + 1}")
        model.model.add(_expression(model, [*here, (carry, 1)]) == digit + base * onward)
        out.append(digit)
        carry = onward
    return _expression(model, [*terms, (carry, 1)]), out


def _expression(model: PartModel, terms: list[tuple[Any, int]]) -> Any:
    kept = [(term, weight) for term, weight in terms if weight]
    return model.cp.LinearExpr.weighted_sum([t for t, _ in kept], [w for _, w in kept])
