"""Which factors contradict each other: CP-SAT with a switch a factor, shrunk to what is needed.

Each factor holds only while its switch is on. Asked to turn all of them on, CP-SAT answers with
some that cannot be on together; what can be left out of these is left out, one by one, until every
one left is needed. These few are a problem of their own, so only the first question is large. Costs
play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.planner.solvers.problem import Factor, Problem


def core(problem: Problem, seconds: float = 30.0) -> list[Factor] | None:
    """Factors of `problem` that no assignment satisfies together, none of them superfluous.

    Args:
        problem: Best not simplified, so that its factors are those that have a meaning.
        seconds: For each question; what is not answered in time is taken as needed.

    Returns:
        The factors in their order; None where there is an assignment, or no answer in time.
    """
    left = _contradiction(problem, problem.factors, seconds)
    for factor in list(left or ()):
        rest = [f for f in left or () if f is not factor]
        if left is not None and len(rest) < len(left):
            smaller = _contradiction(problem, rest, seconds)
            left = left if smaller is None else smaller
    return left


def _contradiction(
    problem: Problem, factors: Sequence[Factor], seconds: float
) -> list[Factor] | None:
    """Some of these factors that cannot hold together; None where all can, or time ran out."""
    from ortools.sat.python import cp_model  # which takes long: only where something is explained

    model = cp_model.CpModel()
    within = dict.fromkeys(v for factor in factors for v in factor.scope)
    values = {v: [model.new_bool_var("") for _ in problem.domains[v]] for v in within}
    for group in values.values():
        model.add_exactly_one(group)
    switches: dict[int, Factor] = {}
    for factor in factors:
        if len(factor.rows) == prod(len(values[v]) for v in factor.scope):
            continue  # it allows everything
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
    solver.parameters.cp_model_presolve = False  # it takes longer than the question
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(model) != cp_model.INFEASIBLE:
        return None
    found = set(solver.sufficient_assumptions_for_infeasibility())
    return [factor for switch, factor in switches.items() if switch in found]
