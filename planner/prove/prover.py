"""A plan held against its model: every op by its rule, every key by what the planner would write.

What is written in a plan is read back into states of tensors (`read_back.py`), which the checker
holds against the rules of the whole graph: values and gradients. Then the plan of these states is
written anew. What a rank does with a plan follows from its text alone, so a plan of which each key
is the same does what was proven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import PlanError, SolverError
from shardwright.planner.api import as_planned, prepare
from shardwright.planner.contract.mesh import CP
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.local_sizes import Unsolvable
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.redistributions import InconsistentBoundary
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.infeasible_core import Contradiction, refuse
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.prove.compare import expected_keys, rewritten, same
from shardwright.planner.prove.read_back import ReadBack, gathered
from shardwright.planner.search.dry_run import local_modules, tried
from shardwright.planner.search.restrictions import Formulation, Restrictions, unpinned_problem
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import checked
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.trace.trace_lock import apart
from shardwright.runtime.model.identity import check_identity

KEPT = 8
"""How many traces and problems a prover keeps."""

SECONDS = 60.0
"""For the solver; what a plan leaves open is next to nothing."""


@dataclass(frozen=True)
class Proven:
    """A plan that holds for its model.

    Attributes:
        plan: As it is, with figures as they come out, and its digest.
        ranks: Those that the model's own code was run as, on meta.
        shapes: How many output shapes of modules were compared on each.
        ops: How many ops of the traced model were held against their rules.
        changes: How many changes of placement.
    """

    plan: Plan
    ranks: tuple[int, ...]
    shapes: int
    ops: int
    changes: int


class Prover:
    """Proves plans for one model, which is traced once for all that agree on how.

    Args:
        model: As `shardwright.plan` takes it.
        args: Example inputs, as the plan was made with.
        kwargs: The same by name.
        explain: Whether to say of a plan that does not hold which ops forbid it: that takes longer.
        trust_remote_code: Whether to run code that comes with the model.
        **hub: Where a hub id leads, as `plan` takes it.
    """

    def __init__(
        self,
        model: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        explain: bool = True,
        trust_remote_code: bool = False,
        **hub: Any,
    ) -> None:
        self.model, self.explain = model, explain
        self.how = {"args": args, "kwargs": kwargs, "trust_remote_code": trust_remote_code, **hub}
        self._traced, self._tasks, self._posed = RecentResults(), RecentResults(), RecentResults()
        self._tried: dict[str, None] = {}

    @apart
    def prove(self, plan: Plan, figures: bool = True) -> Proven:
        """Prove that a plan is right for the model: values, gradients, shapes, and what it says.

        What is not proven is that no plan is better, and the words in it: reasons and notes.

        Args:
            plan: The plan; whether it was edited is not asked.
            figures: Whether what it is predicted to cost must be what comes out.

        Raises:
            PlanError: it is for another model, or does not hold; says what.
            ModelError: the model cannot be read or traced.
            UsageError: its workload is not one that can be asked for.
        """
        task = self._task(plan)
        check_identity(task.source.module, plan)
        formulation, reader = self._problem(task, plan)
        network = reader.restricted(plan)
        small = presolve(network.problem)
        if small is None:
            raise PlanError(f"the plan does not hold: {self._why(task, network)}")
        try:
            optimum = optimize(small, backtracking.solve, SECONDS, movable=network.movable)
            layouts = Layouts(task.graph, network.states, network.assignment(optimum.assignment))
            unfolded, bill = checked(task, formulation.costs, layouts, optimum)
            modules = local_modules(task, layouts)
        except (SolverError, Unsolvable, InconsistentBoundary) as error:
            raise PlanError(f"the plan does not hold: {error}") from None
        found = expected_keys(task, layouts, unfolded, bill, modules, formulation.costs, optimum)
        same(task.source.module, plan, found, figures)
        proven = rewritten(plan, found)
        self._run(task, proven, layouts)
        return Proven(
            proven,
            tuple(sorted({0, plan.world_size - 1})) if task.tp * task.cp > 1 else (0,),
            sum(len(run.watched) for run in task.dry_runs),
            len(unfolded.graph.ops),
            len(unfolded.graph.boundaries) + len(unfolded.graph.uses),
        )

    def _why(self, task: Task, network: CostFunctionNetwork) -> str:
        """What forbids a plan, given the problem that has no solution with it."""
        try:
            if self.explain:
                refuse(network, task.graph, {})
        except Contradiction as error:
            return f"these contradict each other: {'; '.join(error.reasons)}"
        return "the rules forbid what it says"

    def _task(self, plan: Plan) -> Task:
        """The model traced for plans such as this, with its workload and mesh."""
        load = plan.workload
        how = (load.dtype, load.sequence_parallel, plan.mesh.get(CP, 1) > 1, *plan.pins.items())
        traced = self._traced.get(how, lambda: prepare(self.model, **self.how, **as_planned(plan)))
        if load.dtype != traced.workload.dtype:
            raise PlanError(
                f"the plan is for parameters of {load.dtype!r:.40}, the model has "
                f"{traced.workload.dtype}"
            )
        key = (how, load.model_dump_json(), *plan.mesh.items())
        sequence = traced.sequence
        if sequence is not None and traced.cp > 1:
            sequence = sequence.loose()
        changed = {"workload": load, "mesh": dict(plan.mesh), "sequence": sequence}
        return self._tasks.get(key, lambda: replace(traced, **changed))

    def _problem(self, task: Task, plan: Plan) -> tuple[Formulation, ReadBack]:
        sent = gathered(task.graph, plan)

        def pose() -> tuple[Formulation, ReadBack]:
            found = unpinned_problem(task, Restrictions(task.pins, gathered=sent))
            return Formulation(found, found.network, {}), ReadBack(found.network, task.graph)

        return self._posed.get((id(task), sent), pose)

    def _run(self, task: Task, plan: Plan, layouts: Layouts) -> None:
        """Run the model's own code on meta, once for plans that do the same."""
        runtime = {"model", "mesh", "batch_dims", "sub_axes", "modules", "calls"}
        what = plan.model_dump_json(include=runtime)
        if what in self._tried:
            return
        if (wrong := tried(task, plan, layouts, every_block=True)) is not None:
            where = f" in '{wrong.module}'" if wrong.module else ""
            raise PlanError(f"the plan does not hold{where}: {wrong.text}")
        self._tried[what] = None


class RecentResults:
    """What was made last, by a key."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        """What was made for this key, or is made now."""
        if key not in self.made:
            while len(self.made) >= KEPT:
                del self.made[next(iter(self.made))]
            self.made[key] = make()
        return self.made[key]
