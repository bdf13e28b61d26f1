"""Writes sums of any size exactly in the 64 bits of CP-SAT, as digits with carries.

A sum that is small enough is one expression. Otherwise the part that only breaks ties becomes a sum
of its own. If a sum is still too large, each cost is written in digits of a base B, and so is the
sum: the digits of one place add up to a digit of the sum plus B times the carry to the next place.
The first (most significant) place has no upper limit. Two sums compare by their places, the first
one first. So minimising a sum means minimising its places in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

from shardwright.planner.solvers.cpsat.model import PartModel

BITS = 50
"""Sums of at most this many bits are one expression: floats of the linear relaxation are exact."""
DIGIT, ROOM = 50, 61
"""Most bits of a digit, and of the sum of the digits of one place."""


class Sum(NamedTuple):
    """A sum of costs of literals: `least`, which every assignment pays, plus `terms`."""

    least: int
    unit: int
    """The costs of the terms are multiples of this."""
    terms: list[tuple[Any, int]]
    """Literals, each with its cost in units."""

    @property
    def most(self) -> int:
        """The sum of all terms."""
        return sum(weight for _, weight in self.terms)

    @property
    def digits(self) -> tuple[int, int]:
        """The number of places of the sum, and the bits of a digit."""
        size = self.most.bit_length()
        if size <= BITS:
            return 1, BITS
        count = -(-size // min(DIGIT, ROOM - len(self.terms).bit_length()))
        return count, -(-size // count)


class Place(NamedTuple):
    """A place of a sum, and the cost of one unit of it: more than all lower places together."""

    expression: Any
    worth: int


def sum_of(model: PartModel, component: int, part: Callable[[int], int] = int) -> Sum:
    """Return the sum of a component of a problem, with each of its costs mapped by `part`."""
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
    """Return a component's least sum, and the places of what is above it, the first place first."""
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
    """Return the places of a sum, the first one first. Each but the first is below the base."""
    count, bits = total.digits
    first, rest = _carried(model, total.terms, bits, [(1 << bits) - 1] * (count - 1), name)
    places = enumerate([*rest, first])
    return [Place(found, total.unit << k * bits) for k, found in places][::-1]


def limit(model: PartModel, total: Sum, cap: int, name: str) -> bool:
    """Add the constraint that a sum is at most `cap`; False if no assignment can satisfy it."""
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
    """Return the first place of a sum, and integers for the lower places, the last one first.

    Args:
        model: The model, which gets the integers and their constraints.
        terms: Literals and their costs.
        bits: Bits of a digit.
        highest: The largest digit of each place but the first. The range of a digit has the size
            of the base.
        name: Prefix of the integers' names.
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
