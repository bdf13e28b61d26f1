"""Bucket elimination, and lower bounds from it where tables would grow too large.

Each variable has a bucket: the tables of which it is the deepest variable. Going up, a bucket's
tables are joined, the variable is minimised out, and the result is a message to the bucket of its
own deepest variable (R. Dechter, "Bucket elimination: a unifying framework for reasoning",
Artificial Intelligence 113, 1999). Where a join would pass a limit on rows, the bucket is split
into mini-buckets that are minimised apart, which can only lower the result (R. Dechter and I. Rish,
"Mini-buckets: a general scheme for bounded inference", Journal of the ACM 50, 2003).

The messages are kept as a search needs them (K. Kask and R. Dechter, "A general scheme for
automatic generation of search heuristics from specification dependencies", Artificial Intelligence
129, 2001), but as differences: for every full assignment, and for each weighing of the costs,

    cost = root + sum over levels of the differences of the level's mini-buckets,

no difference is negative, and each depends on the variables of its mini-bucket alone. So root plus
the differences of any set of levels is a lower bound for all assignments that agree on their
variables, which is what both pruning and the explanation of a dead end rest on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub

from shardwright.planner.solvers.problem import Problem
from shardwright.planner.solvers.tables import Key, Table, Vector, join, pick

ROWS = 20_000
"""A join may have so many rows."""


@dataclass
class MiniBucket:
    """The joined table of a mini-bucket: values of the levels above -> value here -> difference."""

    above: tuple[int, ...]
    rows: dict[Key, dict[int, Vector]]


@dataclass
class Buckets:
    """All that elimination leaves, by level: level i holds variable `order[i]`."""

    order: list[int]
    sizes: list[int]
    root: Vector
    levels: list[list[MiniBucket]]
    split: list[list[Table]]
    """Tables of the buckets that had to be split; empty for the others."""


def elimination_order(problem: Problem) -> list[int]:
    """Variables from the top of a pseudo-tree down, in depth-first order.

    The variable whose elimination makes the smallest table goes first. Small subtrees are visited
    before large ones: then few assigned variables matter to what is still open.
    """
    count = len(problem.domains)
    near: list[set[int]] = [set() for _ in range(count)]
    for factor in problem.factors:
        for v in factor.scope:
            near[v].update(factor.scope)
    for v in range(count):
        near[v].discard(v)

    def size(v: int) -> int:
        out = len(problem.domains[v])
        for w in near[v]:
            out *= len(problem.domains[w])
        return out

    scores = {v: size(v) for v in range(count)}
    rank, cliques = [0] * count, [set()] * count
    for step in range(count):
        v = min(scores, key=lambda u: (scores[u], u))
        del scores[v]
        rank[v], cliques[v] = step, near[v]
        for w in near[v]:
            near[w] = (near[w] | near[v]) - {v, w}
        for w in near[v]:
            scores[w] = size(w)
    children: list[list[int]] = [[] for _ in range(count + 1)]
    weight = [1] * (count + 1)
    for v in sorted(range(count), key=rank.__getitem__):
        parent = min(cliques[v], key=rank.__getitem__, default=count)
        children[parent].append(v)
        weight[parent] += weight[v]
    order, stack = [], [count]
    while stack:
        v = stack.pop()
        order.append(v)
        stack += sorted(children[v], key=lambda u: (-weight[u], u))
    return order[1:]


def tables(problem: Problem, order: Sequence[int], weights: Sequence[Vector]) -> list[Table]:
    """The factors over levels, with one cost for each row of `weights` over the components."""
    level = {v: i for i, v in enumerate(order)}
    out = []
    for factor in problem.factors:
        at = sorted(range(len(factor.scope)), key=lambda k: level[factor.scope[k]])
        key = pick(at)
        rows = {
            key(values): tuple(sum(w * c for w, c in zip(ws, costs, strict=True)) for ws in weights)
            for values, costs in factor.rows
        }
        out.append(Table(tuple(level[factor.scope[k]] for k in at), rows))
    return out


def _mini_buckets(bucket: Sequence[Table], limit: int) -> list[Table]:
    """The tables of a bucket joined into as few as `limit` allows."""
    out: list[Table] = []
    for table in sorted(bucket, key=lambda t: (-len(t.scope), t.scope)):
        for i, host in enumerate(out):
            joined = join(host, table, limit)
            if joined is not None:
                out[i] = joined
                break
        else:
            out.append(table)
    return out


def bound(
    problem: Problem, order: list[int], weights: Sequence[Vector], deadline: float
) -> Buckets | None:
    """Bounds for each of `weights`; None where no assignment satisfies the factors.

    Once `deadline` has passed nothing is joined any more: what is left takes linear time, and the
    bounds are weaker.
    """
    root: Vector = (0,) * len(weights)
    sizes = [len(problem.domains[v]) for v in order]
    buckets: list[list[Table]] = [[] for _ in order]
    levels: list[list[MiniBucket]] = [[] for _ in order]
    split: list[list[Table]] = [[] for _ in order]

    def place(table: Table) -> bool:
        nonlocal root
        if table.rows and not table.scope:
            root = tuple(map(add, root, table.rows[()]))
        elif table.rows:
            buckets[table.scope[-1]].append(table)
        return bool(table.rows)

    if not all([place(t) for t in tables(problem, order, weights)]):
        return None
    for level in reversed(range(len(order))):
        limit = ROWS if time.monotonic() < deadline else 0
        free = Table((level,), {(x,): (0,) * len(weights) for x in range(sizes[level])})
        minis = _mini_buckets(buckets[level] or [free], limit)
        split[level] = buckets[level] if len(minis) > 1 else []
        buckets[level] = []
        for mini in minis:
            grouped: dict[Key, dict[int, Vector]] = {}
            for values, costs in mini.rows.items():
                grouped.setdefault(values[:-1], {})[values[-1]] = costs
            message = Table(mini.scope[:-1], {})
            for above, choices in grouped.items():
                least = (
                    tuple(map(min, *choices.values()))
                    if len(choices) > 1
                    else next(iter(choices.values()))
                )
                message.rows[above] = least
                grouped[above] = {x: tuple(map(sub, c, least)) for x, c in choices.items()}
            if not place(message):
                return None
            levels[level].append(MiniBucket(mini.scope[:-1], grouped))
    return Buckets(order, sizes, root, levels, split)


def descend(buckets: Buckets) -> tuple[int, ...] | None:
    """The assignment that takes the least difference at each level, None where it ends dead.

    Where no bucket was split it is the optimum of the first of the weights.
    """
    values: list[int] = []
    for minis in buckets.levels:
        choices = [m.rows[tuple(values[k] for k in m.above)] for m in minis]
        costs = [
            (sum(c[x][0] for c in choices), x) for x in choices[0] if all(x in c for c in choices)
        ]
        if not costs:
            return None
        values.append(min(costs)[1])
    out = [0] * len(values)
    for v, x in zip(buckets.order, values, strict=True):
        out[v] = x
    return tuple(out)
