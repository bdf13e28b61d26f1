"""Which factors contradict each other: CP-SAT with a switch a factor, shrunk to what is needed.

Each factor holds only while its switch is on. Asked to turn all of them on, CP-SAT answers with
some that cannot be on together; what can be left out of these is left out, one by one, until every
one left is needed. Costs play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Factor, Problem


def core(problem: Problem, seconds: float = 30.0) -> list[Factor] | None:
    """Factors of `problem` that no assignment satisfies together, none of them superfluous.

    Args:
        problem: Best not simplified, so that its factors are those that have a meaning.
        seconds: For each question; what is not answered in time is taken as needed.

    Returns:
        The factors in their order; None where there is an assignment, or no answer in time.

    Raises:
        SolverError: OR-tools is not installed.
    """
    asked = _Switches(problem, seconds)
    left = asked.contradiction(asked.all)
    if left is None:
        return None
    for i in list(left):
        if i not in left:
            continue
        smaller = asked.contradiction([j for j in left if j != i])
        if smaller is not None:
            left = smaller
    return [problem.factors[i] for i in left]


class _Switches:
    """A CP-SAT model in which the factors can be turned on and off."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError:
            raise SolverError("explanations need OR-tools: pip install ortools") from None
        self._api: Any = cp_model
        self.seconds = seconds
        self.model = cp_model.CpModel()
        sizes = [len(d) for d in problem.domains]
        values = [[self.model.new_bool_var("") for _ in d] for d in problem.domains]
        for group in values:
            self.model.add_exactly_one(group)
        self.switches: dict[int, Any] = {}
        for i, factor in enumerate(problem.factors):
            if len(factor.rows) == prod(sizes[v] for v in factor.scope):
                continue  # it allows everything
            switch = self.switches[i] = self.model.new_bool_var(factor.name)
            rows = []
            for row in factor.rows:
                held = [values[v][x] for v, x in zip(factor.scope, row.values, strict=True)]
                rows.append(held[0] if len(held) == 1 else self.model.new_bool_var(""))
                if len(held) > 1:
                    for literal in held:
                        self.model.add_implication(rows[-1], literal)
            self.model.add_bool_or([*rows, switch.negated()])

    @property
    def all(self) -> list[int]:
        """Numbers of the factors that forbid anything."""
        return list(self.switches)

    def contradiction(self, wanted: Sequence[int]) -> list[int] | None:
        """Some of `wanted` that cannot hold together; None where all can, or time ran out."""
        self.model.clear_assumptions()
        self.model.add_assumptions([self.switches[i] for i in wanted])
        solver = self._api.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = self.seconds
        if solver.solve(self.model) != self._api.INFEASIBLE:
            return None
        found = set(solver.sufficient_assumptions_for_infeasibility())
        return [i for i in wanted if self.switches[i].index in found]
