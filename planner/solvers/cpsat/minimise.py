"""Minimises with CP-SAT: one worker, the full linear relaxation, large sums place by place.

One worker is best: on 6 layers of a dense decoder it proved in 0.05 s what two workers, each with a
search of its own, did not in 10 s. Probing, symmetries and a second presolve take half of the time
and find nothing on these problems; finding overlaps of linear constraints does not help either.
With literals of several tables merged into cliques CP-SAT branched where it otherwise proves at the
root: 1.1 s instead of 0.4 s on a mixture model over 16 ranks. All constraints are in its linear
program from the start: added lazily, they took 8.8 s instead of 0.8 s on a network of 350
convolutions over 2 ranks. The presolve that compares at-most-one with linear constraints drops
solutions in OR-tools 9.15 (google/or-tools#5293), so it is off.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import SolverError
from shardwright.planner.solvers.cpsat.digits import Place, limit, places, sum_of
from shardwright.planner.solvers.cpsat.model import PartModel
from shardwright.planner.solvers.problem import Problem, Result

WORKERS = 1
SEED = 0


@dataclass(frozen=True)
class Posed:
    """A problem as a model, with the least sum of the objective and the places of that sum."""

    model: PartModel
    least: int
    places: list[Place]


def posed(problem: Problem, component: int, caps: Mapping[int, int]) -> Posed | None:
    """Return the model of minimising one component of `problem` under `caps`; None if infeasible.

    The objective of the model is the first place of the sum. None is returned only for what shows
    without a solve: an empty domain or table, or a cap below the least sum.
    """
    if not all(problem.domains) or not all(factor.rows for factor in problem.factors):
        return None
    model = PartModel(problem)
    for c, cap in caps.items():
        if not limit(model, sum_of(model, c), cap, problem.components[c]):
            return None
    least, found = places(model, component)
    model.model.minimize(found[0].expression)
    return Posed(model, least, found)


def as_text(problem: Problem, component: int, caps: Mapping[int, int]) -> str:
    """Return the model in CP-SAT's text format. Its objective is the first place of the sum.

    Raises:
        SolverError: there is no model (see `posed`).
    """
    asked = posed(problem, component, caps)
    if asked is None:
        raise SolverError("there is no model of a problem without solutions")
    return str(asked.model.model.proto)


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under `caps`.

    Raises:
        SolverError: OR-tools refuses the model.
    """
    end = time.monotonic() + seconds
    asked = posed(problem, component, caps)
    if asked is None:
        return Result("infeasible", None, 0)
    best, least = None if hint is None else tuple(hint), asked.least
    told = None
    for k, (place, worth) in enumerate(asked.places):
        if k:
            asked.model.model.minimize(place)
        if best is not None and best != told:
            asked.model.hint(best)
            told = best
        status, found, bound = _ask(asked.model, end - time.monotonic())
        if found is not None or k == 0:  # a hint may be infeasible
            best = found
        least += worth * bound
        if status == "optimal":
            asked.model.model.add(place == bound)
            continue
        if status == "infeasible" and k == 0:
            return Result("infeasible", None, 0)
        if best is None:
            return Result("unknown", None, least)
        return Result("feasible", best, min(least, problem.accept(best, caps)[component]))
    cost = problem.accept(best or (), caps)[component]
    if cost != least:
        raise SolverError(f"cpsat claims {least}, its answer costs {cost}: please report it")
    return Result("optimal", best, cost)


def _ask(model: PartModel, seconds: float) -> tuple[str, tuple[int, ...] | None, int]:
    """Solve the model as it stands; return the status, an assignment and a bound on the objective.

    Raises:
        SolverError: CP-SAT refuses the model.
    """
    cp, solver = model.cp, model.cp.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = max(seconds, 0.01)
    parameters.num_workers, parameters.random_seed = WORKERS, SEED
    parameters.linearization_level = 2
    parameters.add_lp_constraints_lazily = False  # see above
    parameters.symmetry_level = parameters.cp_model_probing_level = 0
    parameters.max_presolve_iterations = 1
    parameters.find_big_linear_overlap = False
    parameters.merge_at_most_one_work_limit = 0  # merged cliques make it branch: see above
    parameters.presolve_inclusion_work_limit = 0  # see above: wrong in 9.15
    parameters.absolute_gap_limit = 0  # the default accepts gaps below float precision
    status = solver.solve(model.model)
    if status == cp.MODEL_INVALID:
        reason = model.model.validate().split(":")[0]
        raise SolverError(f"cpsat refuses the problem: {reason}; use --solver backtracking")
    if status == cp.INFEASIBLE:
        return "infeasible", None, 0
    bound = max(solver.response_proto.inner_objective_lower_bound, 0)  # costs are never negative
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return "unknown", None, bound
    return "optimal" if status == cp.OPTIMAL else "feasible", model.read(solver.value), bound
