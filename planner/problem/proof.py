"""The proof that no plan is better, by the solver that was asked for."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers.problem import Result, Solver
from shardwright.planner.solvers.reduction import solve_reduced


class Proof(NamedTuple):
    """The best plan that is known, and what the prover made of it."""

    result: Result
    proven: bool
    """Whether the prover proved it."""
    better: bool
    """Whether it is the prover's own, and cheaper than what it was told."""


def prove(whole: WarmStart, price: int, found: Result, prover: Solver, seconds: float) -> Proof:
    """The cheaper of what was found and the prover's answer; the bound is the higher of both.

    Args:
        whole: The problem, nothing of it eliminated.
        price: A byte costs 2**price.
        found: The best plan at that price, as the prover is told.
        prover: A solver.
        seconds: Time limit for that.

    Raises:
        SolverError: the prover's answer breaks a factor or a cap, or is cheaper than what was found
            and is said to be proven.
    """
    problem = whole.priced(price)
    fit = partial(whole.digits.fit, price=price)
    result = solve_reduced(problem, [fit], prover, whole.caps, found.assignment, seconds)
    answers = [r.assignment for r in (found, result) if r.assignment is not None]
    costs = [problem.accept(answer)[0] for answer in answers]
    best = min(range(len(answers)), key=costs.__getitem__)
    if best > 0 and found.status == "optimal":
        raise SolverError(
            f"nothing is proven to cost less than {costs[0]}, but a solver finds {costs[1]}: "
            "please report it"
        )
    proven = result.status == "optimal"
    status = result.status if proven else found.status
    bound = max(found.bound, result.bound)
    return Proof(Result(status, answers[best], bound), proven, best > 0)
