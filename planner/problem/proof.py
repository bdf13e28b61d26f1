"""The proof that no plan is better, by the solver that was asked for."""

from __future__ import annotations

import time
from functools import partial

from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Result, Solver
from shardwright.planner.solvers.reduction import solve_reduced


def prove(
    warm_start: WarmStart, price: int, found: Result, prover: Solver, deadline: float
) -> tuple[Result, bool]:
    """The cheaper of what was found and the prover's answer, and whether the prover proved it.

    The bound is the higher of both.

    Args:
        warm_start: What found it.
        price: A byte costs 2**price.
        found: The best plan at that price, as the prover is told.
        prover: A solver.
        deadline: Of `time.monotonic`.

    Raises:
        SolverError: the prover's answer breaks a factor or a cap.
    """
    problem = warm_start.priced(price)
    steps = eliminate, presolve, partial(warm_start.digits.fit, price=price)
    seconds = deadline - time.monotonic()
    result = solve_reduced(problem, steps, prover, warm_start.caps, found.assignment, seconds)
    answers = [r.assignment for r in (found, result) if r.assignment is not None]
    best = min(answers, key=lambda answer: problem.accept(answer)[0])
    proven = result.status == "optimal"
    status = result.status if proven else found.status
    return Result(status, best, max(found.bound, result.bound)), proven
