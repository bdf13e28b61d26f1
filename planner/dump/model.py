"""The problem of a plan as a CP-SAT model, in CP-SAT's own text format."""

from __future__ import annotations

from shardwright.planner.problem.objective import question
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.restrictions import Formulation
from shardwright.planner.solvers import cpsat


def model_text(formulation: Formulation, optimum: Optimum) -> str:
    """The whole problem at the price of a byte that was settled on; nothing of it is reduced."""
    problem = question(formulation.network.problem, optimum.byte_price, bool(optimum.caps))
    return cpsat.as_text(problem, 0, optimum.caps)
