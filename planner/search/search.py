"""Solve, check, try on meta; what fails its trial is forbidden, and the rest solved again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from importlib.metadata import version
from operator import or_
from typing import TypeVar

from shardwright.errors import SolverError
from shardwright.planner.contract.dims import Dim, dim_size
from shardwright.planner.contract.mesh import TP, Coords, batch_dims
from shardwright.planner.contract.plan_file import ModelIdentity, ModulePlan, Plan, Prediction
from shardwright.planner.dry_run.attributes import Unsolvable, local_attributes
from shardwright.planner.dry_run.calls import Rehearsal
from shardwright.planner.dry_run.conflict import Blame, Failure
from shardwright.planner.dry_run.dry_run import Mismatch
from shardwright.planner.emit import (
    Differs,
    count,
    folded,
    module_plans,
    rank_bytes,
    reason_of,
    replicated_parameters,
    shapes,
)
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph, Use
from shardwright.planner.problem.pins import as_table
from shardwright.planner.search.solving import Attempt, Solving
from shardwright.planner.stages import stage
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.verify.first_run import of_first_run

ATTEMPTS = 40
"""How often a plan that fails its trial is solved again without what failed."""

UNPROVEN = "not proven for calls with a mask for padding: they cannot be traced"
"""The note of a plan of a model that takes such masks, where that is so."""

T = TypeVar("T")


@dataclass
class Search(Solving):
    """One planning run: what fails its trial is forbidden, until a plan passes."""

    along_sequence: Callable[[], Search] | None = None
    """Where nobody said whether hidden states are to be split along the sequence: the same so."""
    unmasked: bool = False
    """Whether calls with a mask for padding could not be traced, though the model takes one."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tensors of which a split did not pass the trial -> what went wrong."""

    @cached_property
    def blame(self) -> Blame:
        """Where trials failed so far."""
        return Blame(self.graph, self.source.architecture)

    def run(self, solver: str | None, seconds: float, memory: int | None) -> Plan:
        """The first plan that passes its trial."""
        for _ in range(ATTEMPTS):
            outcome = self._try(self.solve(solver, seconds, memory))
            if isinstance(outcome, Plan):
                return outcome
            self.forbidden |= {(self.graph.one(name), shards) for name, shards in outcome.splits}
            self.failed |= dict.fromkeys((n for n, _ in outcome.splits), outcome.text)
        raise SolverError("no plan passed its trial on meta: please report this model")

    def predicted(self, attempt: Attempt) -> Prediction:
        """What an attempt should cost, per rank."""
        layouts = attempt.layouts
        ranks = self.ranks(layouts.states)
        sizes = {at[TP]: rank_bytes(layouts, at) for at in {r[TP]: r for r in ranks}.values()}
        bill = of_first_run(attempt.bill)
        return Prediction(
            parameter_bytes=[sizes[at[TP]] for at in ranks],
            unsharded_bytes=rank_bytes(layouts, None),
            memory=attempt.memory,
            time_ns=bill.price.time,
            phase_ns=bill.times,
            collectives=count(bill),
        )

    def _try(self, attempt: Attempt) -> Plan | Failure:
        """The plan, or the splits that it may not have."""
        ranks, source, layouts = self.ranks(attempt.whole.states), self.source, attempt.layouts
        corners = [ranks[0], ranks[-1]] if self.tp > 1 else ranks[:1]
        every = {at[TP]: at for at in ranks}.values() if layouts.states.sub.table() else corners
        try:
            traced = {n: layouts.traced(n) for n in self.graph.tensors}
            attributes = local_attributes(self.graph, traced, list(every))
        except Unsolvable as failure:
            return self.blame.of_size(failure, layouts)
        try:
            plans = self._spread(module_plans(source.module, layouts, attributes))
        except Differs as failure:
            return self.blame.of_module(failure.module, str(failure), layouts)
        can, pinned = self._copies(attempt.possible), self._copies(attempt.pinned)
        failed, used = self._copies(self.failed), {u.used: u for u in self.graph.uses}

        def unread(use: Use) -> str:
            like = used[self.whole.origin[use.used]]
            return reason_of(like, layouts, attempt.possible)

        result = Plan(
            model=ModelIdentity(
                architecture=source.architecture,
                config_hash=source.config_hash,
                parameters=shapes(source.module),
            ),
            mesh=dict(self.mesh),
            batch_dims=batch_dims(self.mesh),
            sub_axes=layouts.states.sub.table(),
            workload=self.workload,
            modules=folded(source.module, plans),
            replicated=replicated_parameters(attempt.whole, can, pinned, failed, unread),
            opaque=without_rule(self.graph, layouts.states.axes),
            predicted=self.predicted(attempt),
            solver=attempt.report,
            pins=as_table(self.pins),
            versions={p: version(p) for p in ("torch", "transformers")},
        )
        stage("verify")
        for coords in corners:
            mismatch = self._mismatch(result, traced, coords)
            if mismatch is not None:
                module = self.folding.traced_name(mismatch.module)
                return self.blame.of_module(module, mismatch.text, layouts)
        return result.noted(UNPROVEN) if self.unmasked else result

    def _copies(self, facts: Mapping[str, T]) -> dict[str, T]:
        """Facts on tensors of the folded graph as facts on those of the whole one."""
        return {copy: facts[n] for copy, n in self.whole.origin.items() if n in facts}

    def _spread(self, plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
        """Plans of the modules of the whole model, from those of the traced blocks."""
        return {n: plans[t] for n, t in self.traced_names.items() if t in plans}

    @cached_property
    def rehearsals(self) -> list[Rehearsal]:
        """The whole model; for calls with a mask for padding, that with the traced blocks alone."""
        root, runs, stacks = self.source.module, self.source.runs, self.folding.stacks
        brief = len(self.source.padded) if stacks else 0
        origin = self.whole.origin
        watched = [(m, slot, origin[t]) for m, slot, t in self.whole.graph.watched]
        full = Rehearsal(root, (), runs[: len(runs) - brief], self.untraced, watched)
        if not brief:
            return [full]
        graph = self.graph
        opaque = Opaque(root, {n: n for n in graph.untraced}, graph.stand_ins, graph.branch_paths)
        return [full, Rehearsal(root, stacks, runs, opaque, graph.watched)]

    def _mismatch(
        self, result: Plan, traced: Mapping[str, tuple[Dim, ...]], coords: Coords
    ) -> Mismatch | None:
        """Run the model as one rank; None if all is as `traced`, the layouts, says."""
        sizes = {n: tuple(dim_size(d, coords) or 0 for d in dims) for n, dims in traced.items()}
        found = (rehearsal.mismatch(result, coords, sizes) for rehearsal in self.rehearsals)
        return next((m for m in found if m is not None), None)


def without_rule(graph: Graph, axes: Axes) -> dict[str, int]:
    """Ops without a rule, and how often each occurs in the run where it does most often."""
    runs: dict[int, Counter[str]] = {}
    for op in graph.ops:
        if axes.rules.get(op.name) is None:
            runs.setdefault(op.traced_call, Counter())[op.call.op] += graph.times(op.name)
    most = reduce(or_, runs.values(), Counter[str]())
    return dict(sorted(most.items()))
