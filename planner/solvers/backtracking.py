"""The `backtracking` solver: branch and bound, in Python, over what elimination leaves.

Mostly elimination leaves no variable. This solver finds and proves plans when another solver runs
out of time, or on request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from shardwright.errors import SolverError
from shardwright.planner.solvers.elimination import (
    Elimination,
    Table,
    assignment,
    join,
    pareto,
    tables_of,
)
from shardwright.planner.solvers.problem import Problem, Result


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under at most one cap on another.

    Raises:
        SolverError: there is more than one cap.
    """
    if len(caps) > 1:
        raise SolverError("solver 'backtracking' takes one cap: use --solver cpsat")
    end = time.monotonic() + seconds
    capped, cap = next(iter(caps.items()), (None, 0))
    names = range(len(problem.components))
    two = problem.weighed([[int(c == one) for c in names] for one in (component, capped)])
    best: tuple[int, tuple[int, ...]] | None = None
    if hint is not None and (costs := two.price(hint)) is not None and costs[1] <= cap:
        best = costs[0], tuple(hint)
    sizes = {v: len(domain) for v, domain in enumerate(problem.domains)}
    return search(Elimination(sizes, tables_of(two), pareto), len(sizes), end, best, cap)


def search(
    root: Elimination,
    count: int,
    end: float,
    best: tuple[int, tuple[int, ...]] | None = None,
    cap: int = 0,
) -> Result:
    """Minimise the first component of tables, under a cap on the second.

    Args:
        root: The tables, and which variables are left in them. The choices of their points have
            the values of all others.
        count: Number of all variables.
        end: When to stop, in the time of `time.monotonic`.
        best: The best known cost and assignment.
        cap: The cap.
    """
    stack = [root]
    while stack and time.monotonic() < end:
        node = stack.pop()
        below = math.inf if best is None else best[0] - 1
        if not _within(node, below, cap):
            continue
        node.run(end)
        if not _within(node, below, cap):
            continue
        if node.left:
            stack += _branches(node)
            continue
        front = [p for p in node.front() if p[0] <= below and p[1] <= cap]
        if front:
            best = front[0][0], assignment(front[0][2], count)
    bound = min([_least(node)[0] for node in stack], default=math.inf)
    if best is None:
        known = bound == math.inf
        return Result("infeasible", None, 0) if known else Result("unknown", None, int(bound))
    status = "feasible" if bound < best[0] else "optimal"
    return Result(status, best[1], int(min(bound, best[0])))


def _least(node: Elimination) -> tuple[float, float]:
    """Return a lower bound on each component; infinity if there is no assignment."""
    least = [table.least for table in node.tables.values()]
    return sum(x for x, _ in least), sum(y for _, y in least)


def _within(node: Elimination, most: float, cap: int) -> bool:
    """Drop points that no assignment within both limits has; False if the limits cannot hold."""
    least = _least(node)
    room = most - least[0], cap - least[1]
    if min(room) < 0:
        return False
    for number, table in node.tables.items():
        x, y = (a + b for a, b in zip(table.least, room, strict=True))
        rows = {
            key: kept
            for key, front in table.rows.items()
            if (kept := [p for p in front if p[0] <= x and p[1] <= y])
        }
        node.tables[number] = Table(table.scope, rows)
    return True


def _branches(node: Elimination) -> list[Elimination]:
    """Branch on a variable with the fewest values: one node for each value, the cheapest last."""
    v = min(node.left, key=lambda v: (node.sizes[v], v))
    sizes = {w: node.sizes[w] for w in node.left if w != v}
    out = []
    for value in range(node.sizes[v]):
        chosen = Table((v,), {(value,): [(0, 0, None)]})
        joined = (
            join(table, chosen, pareto, drop=v) if v in table.scope else table
            for table in node.tables.values()
        )
        out.append(Elimination(sizes, [*filter(None, joined)], pareto))
    return sorted(out, key=_least, reverse=True)
