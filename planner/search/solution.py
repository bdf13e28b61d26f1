"""Asks a solver for the cheapest plan of a problem; its answer is checked before it is used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shardwright.errors import SolverError, UsageError
from shardwright.planner import solvers
from shardwright.planner.contract.plan_figures import (
    Memory,
    Objective,
    ObjectiveName,
    Prediction,
    SolverReport,
)
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.recomputed_memory import least_while_computed_again
from shardwright.planner.devices.device import device
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.prediction import prediction
from shardwright.planner.problem.builder import BACKWARD, BYTES, TIME, CostFunctionNetwork
from shardwright.planner.problem.conventions import TABLES
from shardwright.planner.problem.infeasible_core import Contradiction
from shardwright.planner.problem.memory_budget import OverMemory, within
from shardwright.planner.problem.objective import byte_price_ns
from shardwright.planner.problem.optimize import Optimum, PricedPlans, optimize
from shardwright.planner.problem.pins import Pin
from shardwright.planner.search.restrictions import Formulation
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import UnfoldedSolution, check_unfolded, unfolded
from shardwright.planner.solvers.presolve import Presolved
from shardwright.planner.stages import figures, stage
from shardwright.planner.strategies.state import REPLICATED, State
from shardwright.planner.verify.recost import largest
from shardwright.planner.wording import memory_in_words

WITHOUT_ACTIVATIONS = "without activations"
"""What a bound on bytes leaves out, as a message says it."""
MIN_SOLVER_SHARE = 0.1
"""The share of the time limit that a solver may take even if tracing took all of it."""


@dataclass(frozen=True)
class SolverOptions:
    """Options of the search.

    Attributes:
        solver: Name of the solver; None for the default.
        seconds: Time limit of all planning.
        since: When planning began, in the time of `time.monotonic`; None for when a solver does.
        memory: Bytes that a rank may hold. For least time the default is the device's memory; for
            least memory there is no limit by default.
        objective: What is minimised.
    """

    solver: str | None = None
    seconds: float = 60.0
    memory: int | None = None
    objective: ObjectiveName = "time"
    since: float | None = None

    def __post_init__(self) -> None:
        """Check the time limit.

        Raises:
            UsageError: `seconds` is not above 0, or is NaN.
        """
        if not self.seconds > 0:
            raise UsageError(f"time_limit must be above 0 seconds, not {self.seconds}")

    @property
    def left(self) -> float:
        """Seconds until the time limit; below 0 after it."""
        spent = 0.0 if self.since is None else time.monotonic() - self.since
        return self.seconds - spent

    @property
    def for_solver(self) -> float:
        """Seconds that a solver may take: what is left, and a little if nothing is."""
        return max(self.left, MIN_SOLVER_SHARE * self.seconds)

    @property
    def conventions(self) -> frozenset[str]:
        """The conventions that the first attempt follows."""
        return frozenset({TABLES} if self.objective == "memory" else ())

    @property
    def may_be_over(self) -> bool:
        """Whether to look for a plan of least memory if nothing fits the device."""
        return self.objective == "time" and self.memory is None

    def room(self, task: Task) -> int | None:
        """Return the bytes that a rank may hold; None for no limit."""
        return device(task.workload.device).memory_bytes if self.may_be_over else self.memory


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution of the problem, before its dry run.

    Attributes:
        task: The task.
        costs: Prices of the folded graph.
        layouts: Layouts of the folded graph.
        unfolded: The solution on the unfolded graph.
        objective: What was minimised.
        possible: Per tensor, whether any solution shards it.
        pinned: The pin of each pinned stored tensor.
        optimum: The answer of the solvers.
        solver: Name of the requested solver.
    """

    task: Task
    costs: Costs
    layouts: Layouts
    unfolded: UnfoldedSolution
    objective: Objective
    possible: dict[str, bool]
    pinned: Mapping[str, Pin]
    optimum: Optimum
    solver: str

    @property
    def time_ns(self) -> int:
        """The predicted time of the workload."""
        return self.unfolded.bill.first_run.price.time

    @property
    def checked(self) -> Solution:
        """This solution, after the independent check.

        Raises:
            SolverError: the solution breaks a rule, or has other costs than the solver claims.
        """
        _ = self._passes_check
        return self

    @cached_property
    def _passes_check(self) -> bool:
        check_unfolded(self.task, self.costs, self.layouts, self.unfolded, self.optimum)
        return True

    @property
    def report(self) -> SolverReport:
        """Which solver found the solution, and how far it is proven.

        Raises:
            SolverError: the proof, which may run only now, fails as described at `optimize`.
        """
        return reported(self.optimum, self.solver)

    @property
    def unproven(self) -> SolverReport:
        """The report before the requested solver has proved anything."""
        return reported(replace(self.optimum, proven=lambda: False), "backtracking")


def predicted(task: Task, layouts: Layouts, there: UnfoldedSolution) -> Prediction:
    """Return the predicted cost of layouts per rank; `there` has the same on the unfolded graph."""
    held = there.memory, there.memory_by_rank
    return prediction(layouts, there.bill, *held, task.ranks(layouts.states))


def solve(task: Task, formulation: Formulation, asked: SolverOptions) -> Solution:
    """Solve a problem of a task.

    Raises:
        InfeasibleError: there is no solution (a `Contradiction`), or none that fits the memory.
        SolverError: no solution was found in time.
    """
    costs, pinned, room = formulation.costs, formulation.pinned, asked.room(task)
    if asked.may_be_over and room is not None and costs.least_bytes > room:
        raise OverMemory(room, costs.least_bytes, WITHOUT_ACTIVATIONS)
    network = formulation.network
    solver = solvers.current(asked.solver)
    solve_by = solvers.load(solver)
    small = formulation.small
    if small is None:
        raise Contradiction(network, task.graph, pinned)
    figures(
        variables=len(network.problem.names),
        constraints=len(network.problem.factors),
        presolved_variables=len(small.problem.names),
        presolved_constraints=len(small.problem.factors),
    )
    stage("solve")
    aim, left = asked.objective, states_left(network, small)
    passing = least_while_computed_again(costs, left)
    least = small.problem.least(BYTES) + passing
    if asked.may_be_over and room is not None and least > room:
        raise OverMemory(room, least, WITHOUT_ACTIVATIONS, passing=passing)

    @cache
    def candidate(values: tuple[int, ...]) -> tuple[Layouts, UnfoldedSolution]:
        layouts = Layouts(task.graph, costs.states, network.assignment(values))
        return layouts, unfolded(task, layouts, costs)

    def held(values: tuple[int, ...]) -> Memory:
        return candidate(values)[1].memory

    plans = PricedPlans.of(small.problem, solve_by, asked.for_solver)
    how = {"movable": network.movable, "objective": aim, "plans": plans}
    try:
        optimum = within(
            room,
            lambda cap: optimize(small, solve_by, asked.for_solver, cap, **how),
            lambda values: held(values).total,
            lambda values: memory_in_words(
                held(values), largest(task.graph, costs, network.assignment(values))
            ),
        )
    except SolverError:  # an infeasible problem may be why time ran out
        if (error := Contradiction(network, task.graph, pinned)).facts:
            raise error from None
        raise
    price = byte_price_ns(optimum.byte_price)
    objective = Objective(name=aim, byte_price_ns=price, memory_bytes=room)
    found = candidate(optimum.assignment)
    return Solution(task, costs, *found, objective, possible(left), pinned, optimum, solver)


def states_left(network: CostFunctionNetwork, small: Presolved) -> dict[str, list[State]]:
    """Return per tensor the states that presolve left."""
    domain = network.states.domain
    return {
        n: [domain(n)[i] for i in small.source[v][1].values()] for n, v in network.variables.items()
    }


def possible(left: Mapping[str, Iterable[State]]) -> dict[str, bool]:
    """Return per tensor whether any solution shards it: presolve left a state but replicated."""
    return {n: any(s.in_copy != REPLICATED for s in states) for n, states in left.items()}


def reported(optimum: Optimum, solver: str) -> SolverReport:
    """Return the report of an optimum. It has a note if `solver` could not prove it in time."""
    proven, note = optimum.proven(), ""
    if not proven and solver != "backtracking":
        did = "proven" if optimum.optimal else "planned"
        note = f"{solver} ran out of time: {did} with the backtracking solver"
    by = solver if proven else "backtracking"
    return SolverReport(
        name=by,
        found_by=solver if optimum.better else "backtracking",
        proved_by=by if optimum.optimal else "",
        status="optimal" if optimum.optimal else "feasible",
        objective=[optimum.objective, *(optimum.costs[c] for c in (BYTES, TIME, BACKWARD))],
        bound=[optimum.bound],
        gap=optimum.objective - optimum.bound,
        note=note,
    )
