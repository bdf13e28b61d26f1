"""Lagrangian multipliers: caps and objective weighed into one sum that elimination can bound.

With w and l not negative, a solution below the incumbent and within the caps also has
w * objective + sum(l * cost) <= w * (incumbent - 1) + sum(l * cap), so such a sum prunes like a cap
of its own (M. L. Fisher, "The Lagrangian relaxation method for solving integer programming
problems", Management Science 27, 1981). Any multipliers are valid; good ones are looked for one cap
at a time, along the chords of the convex hull of (cost under the cap, objective).

A cap that cannot be undercut (the optimum of a component that was minimised before) is put in
front of the others with a factor that none of them can outweigh: the sum is then lexicographic, and
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

Weights = tuple[int, ...]
Evaluate = Callable[[Weights], Sequence[int] | None]
"""From weights to the costs of an assignment that minimises them, None where none was found."""

ROUNDS = 12


def dot(weights: Sequence[int], costs: Sequence[int]) -> int:
    """The weighed sum."""
    return sum(w * c for w, c in zip(weights, costs, strict=True))


def unit(n: int, i: int) -> Weights:
    """Weights that count only the i-th of n costs."""
    return tuple(int(k == i) for k in range(n))


def combine(a: int, first: Weights, b: int, second: Weights) -> Weights:
    """The sum of a times the first weights and b times the second, in lowest terms."""
    out = [a * x + b * y for x, y in zip(first, second, strict=True)]
    divisor = gcd(*out) or 1
    return tuple(x // divisor for x in out)


def multipliers(
    target: int, caps: Sequence[tuple[int, int]], spans: Sequence[int], evaluate: Evaluate
) -> list[Weights]:
    """Weights that bound cost `target` well where the costs in `caps` are limited.

    Args:
        target: The cost to be bounded.
        caps: Costs and their limits.
        spans: By how much each cost can differ between assignments, at most.
        evaluate: Minimises a weighed sum.

    Returns:
        The target with its multipliers, and the caps that are tight if there are any.
    """
    n = len(spans)
    front: Weights = (0,) * n
    weights = unit(n, target)

    def whole(w: Weights) -> Weights:
        return combine(1 + dot(w, spans), front, 1, w)

    for cost, cap in caps:
        low = evaluate(whole(weights))
        if low is None:
            break
        if low[cost] <= cap:
            continue
        one = unit(n, cost)
        high = evaluate(whole(combine(1 + dot(weights, spans), one, 1, weights)))
        if high is None:
            break
        if high[cost] >= cap:
            front = combine(1 + spans[cost], front, 1, one)
        else:
            weights = _chords(weights, one, cap, low, high, lambda w: evaluate(whole(w)))
    return [whole(weights)] + ([front] if any(front) else [])


def _chords(
    weights: Weights,
    one: Weights,
    cap: int,
    low: Sequence[int],
    high: Sequence[int],
    evaluate: Evaluate,
) -> Weights:
    """Weights along the edge of the hull over `cap`, between `low` (cheap) and `high` (within)."""
    best = weights
    for _ in range(ROUNDS):
        rise, run = dot(weights, high) - dot(weights, low), dot(one, low) - dot(one, high)
        if rise <= 0 or run <= 0:
            break
        best = combine(run, weights, rise, one)
        found = evaluate(best)
        if found is None or dot(best, found) >= dot(best, low):
            break
        low, high = (found, high) if dot(one, found) > cap else (low, found)
    return best
