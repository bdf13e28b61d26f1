"""Finds a minimal set of factors that contradict each other, with CP-SAT and one switch per factor.

Each factor holds only while its switch is on. With all switches assumed on, CP-SAT returns some
that cannot be on together. Then factors are left out one by one, while the rest still contradict
each other. The first models have the factors around `seeds` only, and more each time, because a
contradiction is mostly near them. Costs play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.planner.solvers.problem import Factor, Problem

SECONDS = 30.0
"""Time limit of each call of CP-SAT. If it runs out, a factor counts as needed."""


def core(problem: Problem, seeds: Sequence[Factor] = ()) -> list[Factor] | None:
    """Return factors of `problem` that no assignment satisfies together, none of them superfluous.

    Args:
        problem: The problem, not presolved: only its original factors mean something to a user.
        seeds: Factors of `problem` that probably take part in the contradiction.

    Returns:
        The factors in their order; None if there is an assignment, or no answer in time.
    """
    around = (_contradiction(problem, some) for some in _neighbourhoods(problem, seeds))
    left = next(filter(None, around), None)
    for factor in list(left or ()):
        rest = [f for f in left or () if f is not factor]
        if left is not None and len(rest) < len(left):
            smaller = _contradiction(problem, rest)
            left = left if smaller is None else smaller
    return left


def _neighbourhoods(problem: Problem, seeds: Sequence[Factor]) -> Iterator[list[Factor]]:
    """Yield the factors within 4, 8, 16, ... steps of the seeds, and last all factors."""
    near, steps = {v for factor in seeds for v in factor.scope}, 0
    inside: list[Factor] = []
    while near:
        found = [f for f in problem.factors if not near.isdisjoint(f.scope)]
        if len(found) == len(inside):
            break
        inside, steps = found, steps + 1
        near = near.union(*(f.scope for f in found))
        if steps >= 4 and steps.bit_count() == 1 and len(inside) < len(problem.factors):
            yield inside
    yield problem.factors


def _contradiction(problem: Problem, factors: Sequence[Factor]) -> list[Factor] | None:
    """Return some factors that cannot hold together; None if all can, or if time ran out."""
    from ortools.sat.python import cp_model  # slow to import, and rarely needed

    model = cp_model.CpModel()
    within = dict.fromkeys(v for factor in factors for v in factor.scope)
    values = {v: [model.new_bool_var("") for _ in problem.domains[v]] for v in within}
    for group in values.values():
        model.add_exactly_one(group)
    switches: dict[int, Factor] = {}
    for factor in factors:
        if len(factor.rows) == prod(len(values[v]) for v in factor.scope):
            continue  # the factor allows everything
        switch = model.new_bool_var(factor.name)
        switches[switch.index] = factor
        model.add_assumption(switch)
        rows = []
        for row in factor.rows:
            held = [values[v][x] for v, x in zip(factor.scope, row.values, strict=True)]
            rows.append(held[0] if len(held) == 1 else model.new_bool_var(""))
            if len(held) > 1:
                for literal in held:
                    model.add_implication(rows[-1], literal)
        model.add_bool_or([*rows, switch.negated()])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.cp_model_presolve = False  # presolve takes longer than the solve
    solver.parameters.max_time_in_seconds = SECONDS
    if solver.solve(model) != cp_model.INFEASIBLE:
        return None
    found = set(solver.sufficient_assumptions_for_infeasibility())
    return [factor for switch, factor in switches.items() if switch in found]
