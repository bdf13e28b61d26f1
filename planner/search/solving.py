"""Ask a solver for the cheapest plan, as conventions and pins want it, and check its answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner import solvers
from shardwright.planner.contract.plan_file import Memory, SolverReport
from shardwright.planner.cost.cost import Costs
from shardwright.planner.dry_run.conflict import Splits
from shardwright.planner.emit import Layouts
from shardwright.planner.problem.builder import (
    BACKWARD,
    BYTES,
    TIME,
    CostFunctionNetwork,
    build_network,
)
from shardwright.planner.problem.conventions import Usual, follow, projections, token_tables
from shardwright.planner.problem.gathered import unsplittable
from shardwright.planner.problem.infeasible_core import refuse
from shardwright.planner.problem.memory_budget import OverMemory, within
from shardwright.planner.problem.optimize import SLACK, Optimum, optimize
from shardwright.planner.problem.pins import Pin, resolve, restrict
from shardwright.planner.search.task import Task
from shardwright.planner.solvers.presolve import Presolved, presolve
from shardwright.planner.stages import figures, stage
from shardwright.planner.strategies.states import States
from shardwright.planner.verify.check import check
from shardwright.planner.verify.largest import largest
from shardwright.planner.verify.recost import Bill
from shardwright.planner.wording import memory_in_words


@dataclass(frozen=True)
class Attempt:
    """A solution of the problem, not yet tried; `possible` says which tensors any could split.

    `layouts` are those of the folded graph, `whole` and `bill` speak of the whole one.
    """

    layouts: Layouts
    whole: Layouts
    bill: Bill
    memory: Memory
    report: SolverReport
    possible: dict[str, bool]
    pinned: dict[str, Pin]


@dataclass
class Solving(Task):
    """A task, and what is forbidden or allowed besides: what is solved may be tried."""

    forbidden: Splits = frozenset()
    gathered: frozenset[str] = frozenset()
    """Stored tensors that may be gathered as they are read."""

    def blank(self, forbidden: Splits = frozenset()) -> tuple[Costs, CostFunctionNetwork]:
        """Prices, and the problem without any pin."""
        states = States(self.graph, self.axes, self.tp, self.lookups, forbidden, self.sequence)
        costs = Costs(self.graph, self.axes, states, self.workload, self.caches, self.gathered)
        return costs, build_network(self.graph, states, costs, self.rigid)

    def solve(self, solver: str | None, seconds: float, memory: int | None) -> Attempt:
        """Solve the problem as it stands now: without what is forbidden, and with the pins.

        As the conventions want it, or if that cannot be, without them.

        Raises:
            InfeasibleError: the pins cannot hold, or nothing fits the memory, or hidden states
                cannot be split along the sequence.
        """
        found = self._with_gathers(solver, seconds, memory)
        usual = projections(self.graph, found.layouts.states) if memory is None else {}
        placed = found.layouts.assignment
        if any(placed[n] not in usual[n] for n in usual.keys() - found.pinned.keys()):
            with suppress(InfeasibleError):
                return self._solve(usual, solver, seconds, memory)
        return found

    def _with_gathers(self, solver: str | None, seconds: float, memory: int | None) -> Attempt:
        """The cheapest, with weights gathered where too much cannot be used in parts."""
        try:
            found = self._solve({}, solver, seconds, memory)
        except OverMemory:
            if not self._gather(0):
                raise
        else:
            if not self._gather(SLACK, None if self.pins else found):
                return found
        return self._solve({}, solver, seconds, memory)

    def _gather(self, least: float, found: Attempt | None = None) -> bool:
        """Let what cannot be used in parts be gathered, if it is more than a share of all bytes.

        `found` is what was solved without pins. True if more is gathered than before.
        """
        if found is not None:
            states, can = found.layouts.states, found.possible
        else:
            costs, network = self.blank(self.forbidden)
            small = presolve(network.problem)
            states, can = costs.states, possible(network, small) if small else {}
        more = unsplittable(self.graph, states, can, least) - self.gathered
        self.gathered |= more
        return bool(more)

    def _solve(
        self, usual: Usual, solver: str | None, seconds: float, memory: int | None
    ) -> Attempt:
        """The same with these parameters as is usual, and tables of tokens if they can be."""
        costs, network, wanted = self.problem()
        tables = token_tables(self.graph, costs.states)
        if follow(network, {**usual, **tables}, wanted) and tables:
            with suppress(InfeasibleError):
                return self.answer(costs, network, wanted, solver, seconds, memory)
            costs, network, wanted = self.problem()
            follow(network, usual, wanted)
        return self.answer(costs, network, wanted, solver, seconds, memory)

    def problem(self) -> tuple[Costs, CostFunctionNetwork, dict[str, Pin]]:
        """Prices, the problem with the pins, and the pin of each stored tensor."""
        stage("problem")
        costs, network = self.blank(self.forbidden)
        wanted = resolve(self.pins, self.graph, costs.states)
        restrict(network, wanted)
        return costs, network, wanted

    def answer(
        self,
        costs: Costs,
        network: CostFunctionNetwork,
        wanted: dict[str, Pin],
        solver: str | None = None,
        seconds: float = 60.0,
        memory: int | None = None,
    ) -> Attempt:
        """Solve a problem of this model, and check the answer.

        Raises:
            InfeasibleError: it has no solution, or none that fits the memory.
        """
        asked = solvers.load(solver) if solver else None
        backup, note = (None, "") if solver else solvers.backup()
        small = presolve(network.problem)
        if small is None:
            refuse(network, self.graph, wanted)
            raise InfeasibleError("the rules contradict each other on this model: please report it")
        figures(
            variables=len(network.problem.names),
            constraints=len(network.problem.factors),
            presolved_variables=len(small.problem.names),
            presolved_constraints=len(small.problem.factors),
        )
        stage("solve")
        try:
            optimum = within(
                memory,
                lambda cap: optimize(small, asked, seconds, cap, backup, movable=network.movable),
                lambda values: self.held(costs, network, values).total,
                lambda values: memory_in_words(
                    self.held(costs, network, values),
                    largest(self.graph, costs, network.assignment(tuple(values))),
                ),
            )
        except SolverError:
            with suppress(SolverError):  # the facts need OR-tools, which may be what is missing
                refuse(network, self.graph, wanted)  # what has no solution need not end in time
            raise
        stage("check")
        layouts = Layouts(self.graph, costs.states, network.assignment(optimum.assignment))
        whole = self.unfolded(layouts)
        bill = Bill(self.costs_of(self.whole, whole.states, costs), whole.assignment)
        alike = [op for op, _ in bill.ops]
        check(whole.graph, whole.states, whole.assignment, self.rigid, alike)
        if self.whole.graph is not self.graph:  # which has runs that are not unfolded
            check(self.graph, costs.states, layouts.assignment, self.rigid)
            Bill(costs, layouts.assignment).crossings()
        agree(bill.price, optimum)
        report = reported(optimum, solver or solvers.DEFAULT, note)
        stage("emit")
        held = self.memory_of(bill, layouts, costs)
        return Attempt(layouts, whole, bill, held, report, possible(network, small), wanted)


def possible(network: CostFunctionNetwork, small: Presolved) -> dict[str, bool]:
    """Per tensor, whether any solution splits it: whether a state but the first, whole, is left."""
    return {n: any(small.source[v][1].values()) for n, v in network.variables.items()}


def reported(optimum: Optimum, solver: str, note: str) -> SolverReport:
    """Who found the plan, and how far it is proven; where `solver` could not, that is noted."""
    if optimum.from_warm_start and solver != "backtracking":
        note = note or f"{solver} ran out of time: planned with the backtracking solver"
    return SolverReport(
        name="backtracking" if optimum.from_warm_start else solver,
        status="optimal" if optimum.optimal else "feasible",
        objective=[optimum.objective, *(optimum.costs[c] for c in (BYTES, TIME, BACKWARD))],
        bound=[optimum.bound],
        gap=optimum.objective - optimum.bound,
        note=note,
    )


def agree(found: tuple[int, int, int], optimum: Optimum) -> None:
    """Compare the checker's price with the solver's.

    Raises:
        SolverError: they differ; such a plan is never written.
    """
    claimed = (optimum.costs[BYTES], optimum.costs[TIME], optimum.costs[BACKWARD])
    if found != claimed:
        raise SolverError(
            f"the solver claims bytes and times {claimed}, the checker finds {found}: "
            "please report it"
        )
