"""`Prover` proves a plan for its model: every op by its rule, every key against the planner's.

The plan is read back into states of tensors (`read_back.py`). The checker compares these with the
rules of the unfolded graph: values and gradients. Then the plan of these states is written again.
What a rank does follows from the text of a plan alone, so a plan with the same keys does what was
proven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import PlanError, SolverError
from shardwright.planner.contract.mesh import CP
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.local_sizes import Unsolvable
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.redistributions import InconsistentBoundary
from shardwright.planner.prepare import as_planned, prepare
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.infeasible_core import Contradiction
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.prove.compare import expected_keys, rewritten, same
from shardwright.planner.prove.read_back import ReadBack, gathered
from shardwright.planner.search.restrictions import Formulation, Restrictions, unpinned_problem
from shardwright.planner.search.task import Task
from shardwright.planner.search.try_plan import local_modules, tried
from shardwright.planner.search.unfolded import check_unfolded, unfolded
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.trace.trace_lock import not_in_model_code
from shardwright.runtime.model.identity import check_identity

KEPT = 8
"""How many traces and problems a prover keeps."""

SECONDS = 60.0
"""Time limit of the solver. A plan leaves little open, so this is ample."""


@dataclass(frozen=True)
class Proven:
    """A plan that holds for its model.

    Attributes:
        plan: The plan with updated figures and digest.
        ranks: The ranks that the model's own code was run as, on meta.
        shapes: Number of module output shapes that were compared on each rank.
        ops: Number of ops of the unfolded graph that were checked against their rules.
        changes: Number of boundaries and uses that were checked.
    """

    plan: Plan
    ranks: tuple[int, ...]
    shapes: int
    ops: int
    changes: int


class Prover:
    """Proves plans for one model. The trace is shared by plans that need the same one.

    Args:
        model: The model, as for `shardwright.plan`.
        args: Example inputs, as for the plan.
        explain: Whether the error for a plan that does not hold names the ops against it. This
            takes longer.
        **how: Other arguments of `shardwright.plan` that say how a model is read.
    """

    def __init__(
        self, model: Any, args: tuple[Any, ...] = (), explain: bool = True, **how: Any
    ) -> None:
        self.model, self.explain, self.how = model, explain, {"args": args, **how}
        self._traced, self._tasks, self._posed = RecentResults(), RecentResults(), RecentResults()
        self._tried: dict[str, None] = {}

    @not_in_model_code
    def prove(self, plan: Plan, figures: bool = True) -> Proven:
        """Prove that a plan is right for the model: values, gradients, shapes and keys.

        It does not prove that the plan is optimal, nor the texts in it: reasons and notes.

        Args:
            plan: The plan. Its digest is not checked.
            figures: Whether its predicted costs must match too.

        Raises:
            PlanError: the plan is for another model, or does not hold; the message says why.
            ModelError: the model cannot be read or traced.
            UsageError: its workload is invalid.
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
            there = unfolded(task, layouts, formulation.costs)
            check_unfolded(task, formulation.costs, layouts, there, optimum)
            modules = local_modules(task, layouts)
        except (SolverError, Unsolvable, InconsistentBoundary) as error:
            raise PlanError(f"the plan does not hold: {error}") from None
        found = expected_keys(task, layouts, there, modules, optimum)
        same(task.source.module, plan, found, figures)
        proven = rewritten(plan, found)
        self._run(task, proven, layouts)
        graph = there.layouts.graph
        return Proven(
            proven,
            tuple(sorted({0, plan.world_size - 1})) if task.tp * task.cp > 1 else (0,),
            sum(len(run.watched) for run in task.dry.each),
            len(graph.ops),
            len(graph.boundaries) + len(graph.uses),
        )

    def _why(self, task: Task, network: CostFunctionNetwork) -> str:
        """Return what forbids a plan, given its problem, which has no solution."""
        if self.explain and (error := Contradiction(network, task.graph, {})).facts:
            return f"these contradict each other: {'; '.join(error.reasons)}"
        return "the rules forbid what it says"

    def _task(self, plan: Plan) -> Task:
        """Return the task of the model for the plan's workload and mesh; traces are reused."""
        load = plan.workload
        dims = plan.mesh.get(CP, 1) > 1, load.spread > 1
        how = (load.dtype, load.sequence_parallel, *dims, *plan.pins.items())
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
            return Formulation(found, lambda: found.network, {}), ReadBack(
                found.network, task.graph
            )

        return self._posed.get((id(task), sent), pose)

    def _run(self, task: Task, plan: Plan, layouts: Layouts) -> None:
        """Run the model's own code on meta, once for plans with the same runtime keys."""
        runtime = {"model", "mesh", "batch_dims", "sub_axes", "modules", "calls"}
        what = plan.model_dump_json(include=runtime)
        if what in self._tried:
            return
        if (wrong := tried(task, plan, layouts, every_block=True)) is not None:
            where = f" in '{wrong.module}'" if wrong.module else ""
            raise PlanError(f"the plan does not hold{where}: {wrong.text}")
        self._tried[what] = None


class RecentResults:
    """A cache of the `KEPT` results that were made last."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the result for this key, making it if needed."""
        if key not in self.made:
            while len(self.made) >= KEPT:
                del self.made[next(iter(self.made))]
            self.made[key] = make()
        return self.made[key]
