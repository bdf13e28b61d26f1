"""The local polytope by OR-tools' GLOP, with bounds that are proven in whole numbers.

One column a row and one a value; rows that hold a value sum to it. GLOP works in floats, so nothing
that it says is taken on trust: its duals, rounded, say which costs to move between tables (see
`polytope.py`), and the bound that this leaves is exact whatever they were (M. Cooper et al., "Soft
arc consistency revisited", Artificial Intelligence 174, 2010). What costs more over that bound than
the best known assignment goes, and the rest, now in smaller numbers, is solved again: each round
gains the digits of a float (A. Gleixner, D. Steffy and K. Wolter, "Iterative refinement for linear
programming", INFORMS Journal on Computing 28, 2016). Where the relaxation is not integral, a
variable is branched on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwright.planner.solvers import needs_ortools
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.incumbent import Incumbent
from shardwright.planner.solvers.polytope import Moves, Node, root
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Problem, Result
from shardwright.planner.solvers.reduction import solve_reduced

ROUNDS = 12
"""Refinements of one relaxation, at most."""
GAIN = 2
"""A round that does not leave the gap smaller by this factor is the last."""
FINE = 2**20
"""With caps, costs are counted in this part of a unit: multipliers are no whole numbers."""


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under `caps`; what can be eliminated is, before.

    Raises:
        SolverError: OR-tools is not installed.
    """
    small = problem.only([component, *caps])
    most = dict(enumerate(caps.values(), 1))
    return solve_reduced(small, [eliminate, presolve], _solve, most, hint, seconds)


def _solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """The same of a problem of component 0 and those under caps, in their order."""
    try:
        from ortools.linear_solver import pywraplp
    except ImportError:
        raise needs_ortools("lp") from None
    deadline = time.monotonic() + seconds
    incumbent = Incumbent(problem, list(caps.values()))
    if hint is not None:
        incumbent.offer(tuple(hint))
    branch = _Branch(pywraplp, problem, incumbent, FINE if caps else 1, deadline)
    left = [root(problem, incumbent.caps, branch.fine)]
    while left and time.monotonic() < deadline:
        left += branch.visit(left.pop())
    if left:
        bound = -(-min(node.lower for node in left) // branch.fine)
        if incumbent.assignment is None:
            return Result("unknown", None, bound)
        if bound < incumbent.cost:
            return Result("feasible", incumbent.assignment, bound)
    if incumbent.assignment is None:
        return Result("infeasible", None, 0)
    return Result("optimal", incumbent.assignment, incumbent.cost)


class _Relaxed(NamedTuple):
    """What GLOP found for a node: parts of values, and whole numbers near its duals."""

    parts: list[dict[int, float]]
    moves: Moves
    multipliers: list[int]


class _Branch:
    """Visits nodes: relaxes, refines, and branches on what stays between values."""

    def __init__(
        self,
        lp: Any,
        problem: Problem,
        incumbent: Incumbent,
        fine: int,
        deadline: float,
    ) -> None:
        self.lp, self.incumbent, self.fine, self.deadline = lp, incumbent, fine, deadline
        self.most = problem.most(0)
        least = sum(min((r.costs[0] for r in f.rows), default=0) for f in problem.factors)
        self.span = fine * (1 + self.most - least)

    @property
    def limit(self) -> int:
        """What is of use costs no more."""
        found = self.incumbent.assignment is not None
        return self.fine * (self.incumbent.cost - 1 if found else self.most)

    def visit(self, node: Node) -> list[Node]:
        """The nodes below, the most promising last; none where nothing better is in it."""
        parts: list[dict[int, float]] = [{} for _ in node.values]
        for _ in range(ROUNDS):
            before = self.limit - node.lower
            if not node.tighten(self.limit):
                return []
            if all(len(v) == 1 for v in node.values):
                self.incumbent.offer(tuple(next(iter(v)) for v in node.values))
                return []
            relaxed = self.relax(node)
            if relaxed is None:
                break
            parts = relaxed.parts
            node.move(relaxed.moves, relaxed.multipliers)
            self.incumbent.offer(tuple(max(p, key=p.__getitem__) for p in parts))
            if not node.tighten(self.limit):
                return []
            if GAIN * (self.limit - node.lower) > before:
                break
        v = min(
            (v for v, values in enumerate(node.values) if len(values) > 1),
            key=lambda v: (max(parts[v].values(), default=0), v),
            default=None,
        )
        if v is None:
            self.incumbent.offer(tuple(next(iter(v)) for v in node.values))
            return []
        best = max(node.values[v], key=lambda x: (parts[v].get(x, 0), -x))
        with_it, without = node.copy(), node
        with_it.values[v] = {best: node.values[v][best]}
        del without.values[v][best]
        return [without, with_it]

    def relax(self, node: Node) -> _Relaxed | None:
        """The linear relaxation of `node`, None where GLOP has no optimum of it."""
        solver = self.lp.Solver.CreateSolver("GLOP")
        solver.SetTimeLimit(max(int(1000 * (self.deadline - time.monotonic())), 1))
        objective, infinity = solver.Objective(), solver.infinity()
        scale = max(max(costs.values()) for costs in (*node.rows, *node.values)) or 1

        def column(cost: int) -> Any:
            variable = solver.NumVar(0.0, infinity, "")
            if cost:
                objective.SetCoefficient(variable, cost / scale)
            return variable

        parts = [{x: column(c) for x, c in costs.items()} for costs in node.values]
        for columns in parts:
            one = solver.Constraint(1.0, 1.0)
            for variable in columns.values():
                one.SetCoefficient(variable, 1.0)
        sums: list[list[dict[int, Any]]] = []
        chosen = [{key: column(c) for key, c in costs.items()} for costs in node.rows]
        for scope, columns in zip(node.scopes, chosen, strict=True):
            sums.append([{x: solver.Constraint(0.0, 0.0) for x in node.values[v]} for v in scope])
            for v, held in zip(scope, sums[-1], strict=True):
                for x, constraint in held.items():
                    constraint.SetCoefficient(parts[v][x], -1.0)
            for key, variable in columns.items():
                for x, held in zip(key, sums[-1], strict=True):
                    held[x].SetCoefficient(variable, 1.0)
        # The room under a cap gives its multiplier back; as much over it as the largest row holds
        # costs more than anything. Each byte as much would be more than a float can tell apart.
        limits, units = [], []
        for cap, multiplier in zip(node.caps, node.multipliers, strict=True):
            unit = max((abs(c) for costs in cap.rows for c in costs.values()), default=1) or 1
            limit = solver.Constraint(cap.most / unit, cap.most / unit)
            limit.SetCoefficient(column(multiplier * unit), 1.0)
            limit.SetCoefficient(column(self.span), -1.0)
            for columns, costs in zip(chosen, cap.rows, strict=True):
                for key, variable in columns.items():
                    if costs[key]:
                        limit.SetCoefficient(variable, costs[key] / unit)
            limits.append(limit)
            units.append(unit)
        objective.SetMinimization()
        if solver.Solve() != self.lp.Solver.OPTIMAL:
            return None
        return _Relaxed(
            [{x: c.solution_value() for x, c in columns.items()} for columns in parts],
            [[{x: _near(c, scale) for x, c in held.items()} for held in found] for found in sums],
            [
                max(old - _near(c, scale, unit), 0)
                for old, c, unit in zip(node.multipliers, limits, units, strict=True)
            ],
        )


def _near(constraint: Any, scale: int, unit: int = 1) -> int:
    """A constraint's dual in costs a unit, rounded."""
    return round(constraint.dual_value() * scale / unit)
