"""`TracedModel`: a model that is traced once, and the tasks of planning it on any mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from shardwright.errors import InfeasibleError, ModelError, UsageError
from shardwright.planner.blocks.fold import Unfoldable
from shardwright.planner.blocks.stacks import find_stacks
from shardwright.planner.contract.mesh import CP, EP, TP, replicas
from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.plan_figures import DataParallel, Workload
from shardwright.planner.emit.compared_lengths import keep_beside_unguarded, undecided_lengths
from shardwright.planner.experts.mixtures import find_mixtures, marked
from shardwright.planner.graph.alignment import align, misaligned
from shardwright.planner.graph.axes import Axes, refine
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.graph.lost_lengths import keep_beside_lost
from shardwright.planner.graph.trace_sizes import TRACE_SEQ
from shardwright.planner.problem.pins import Pin
from shardwright.planner.search.dry_runs import DryRuns
from shardwright.planner.search.task import Task
from shardwright.planner.stages import stage
from shardwright.planner.strategies.sequence import OpenSequence, open_sequence
from shardwright.planner.trace.folded_trace import Traced, trace_folded
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.runs.known_runs import Known
from shardwright.planner.trace.runs.other_lengths import with_other_lengths
from shardwright.planner.trace.time_limit import traced_until
from shardwright.planner.trace.trace import trace_model
from shardwright.runtime.modules.recomputation import recomputable

MAX_ROUNDS = 3
"""How often calls of other lengths are added: the calls added last may compare other lengths."""
TIMES_THE_LAST_TRACE = 2
"""An estimate: tracing again and the search take this many times what the last trace took. If that
is more than the time that is left, the model is not traced again."""


def _at_other_lengths(found: Traced, task: Task) -> Traced:
    """Return a trace with calls of other lengths too, if its code decides by lengths."""
    source = with_other_lengths(found.source, undecided_lengths(task.graph, task.axes))
    if source is None:
        return found
    with suppress(ModelError, Unfoldable):
        return _of_other_source(found, source, whole=not found.folding.stacks)
    return found


def _of_other_source(found: Traced, source: Source, whole: bool = True) -> Traced:
    """Return the trace of a source that differs little; blocks are folded only if they were.

    `whole`, and what is raised, are those of `trace_folded`.
    """
    folded = {stack.path for stack in found.folding.stacks}
    left = {stack.path for stack in find_stacks(source.module)} - folded
    known = Known(folds=bool(folded), unfoldable=[((), frozenset(left))])
    return trace_folded(source, whole, known)._replace(unmasked=found.unmasked)


def spread_experts(found: Traced, before: Traced | None = None) -> Traced:
    """Return a trace with marks for the mixtures whose experts are spread over the ranks of `ep`.

    Args:
        found: The trace.
        before: Another trace of the model, for which this was done before.

    Raises:
        InfeasibleError: the model has none whose tokens may travel.
    """
    source, unfolded = found.source, found.unfolded
    earlier = (before or found).folding
    known, alike = earlier.graph.mixtures, earlier.traced_name
    mixtures = find_mixtures(found.graph, source.module, lambda name: known.get(alike(name)))
    if not mixtures.found:
        looks = (f": '{m}' looks like one, but {w}" for m, w in mixtures.refused.items())
        some = next(looks, " (of modules called with hidden states, expert numbers and weights)")
        raise InfeasibleError(
            f"{EP} spreads the experts of mixtures, but {source.architecture} has no mixture "
            f"whose tokens may be sent to other ranks{some}: name the mesh dim dp instead"
        )
    graph = marked(found.graph, mixtures)
    kinds = {kind: dict(getattr(graph.marks, kind)) for kind in ("spread_experts", "travelling")}
    copies = {
        kind: {(copy, known[n]) for copy, n in unfolded.origin.items() if n in known}
        for kind, known in kinds.items()
    }
    fixed = {(copy, 0) for copy, n in unfolded.origin.items() if (n, 0) in graph.marks.fixed}
    copies["fixed"] = unfolded.graph.marks.fixed | fixed
    every = replace(unfolded.graph, marks=replace(unfolded.graph.marks, **copies))
    folding = replace(found.folding, graph=graph)
    return found._replace(unfolded=replace(unfolded, graph=every, folding=folding))


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model with a workload, to be planned on one mesh or several.

    Attributes:
        source: The model.
        workload: The workload, on one device.
        pins: The user's pins.
        sequence_parallel: Whether to shard hidden states along the sequence; None to try it where
            nothing fits without.
        recompute: Whether blocks keep only their inputs in training and are computed again in the
            backward pass, or how many of each list of blocks; None for as many as are needed to
            fit.
        until: When planning must end, in the time of `time.monotonic`. Without time for a second
            trace the plan refuses the lengths for which its calls decide otherwise. The first one
            may take twice as long.
    """

    source: Source
    workload: Workload
    pins: tuple[Pin, ...]
    sequence_parallel: bool | None = None
    recompute: bool | Mapping[str, int] | None = None
    until: float = math.inf
    _traces: dict[tuple[bool, bool], Traced] = field(default_factory=dict, init=False)
    _spread: dict[tuple[bool, bool], Traced] = field(default_factory=dict, init=False)
    _axes: dict[object, tuple[list[Op], Axes, OpenSequence | None]] = field(
        default_factory=dict, init=False
    )

    def on(
        self,
        mesh: Mapping[str, int],
        dp: DataParallel,
        gpus_per_host: int | None,
        shares: Sequence[int] | None = None,
    ) -> Task:
        """Return the task of planning the model on a mesh.

        Args:
            mesh: Mesh dims and their ranks.
            dp: What copies of the model do.
            gpus_per_host: Ranks on one host; None if all are on one.
            shares: Parts of the ranks of tp; by default those of the workload.

        Raises:
            ModelError: the model cannot be traced.
            InfeasibleError: sequences are to be sharded, and there are none between its blocks.
            SolverError: there was not enough time to trace the model.
        """
        here: dict[str, Any] = {
            "replicas": replicas(mesh),
            "dp": dp,
            "gpus_per_host": gpus_per_host,
            "spread": mesh.get(EP, 1),
            "sequence_parallel": bool(self.sequence_parallel),
        }
        if shares is not None:
            here["shares"] = [*shares]
        workload = self.workload.model_copy(update=here)
        # whether there are ranks and tokens to split
        several = mesh[TP] > 1 == mesh.get(CP, 1) and workload.phases.keys() != {"decode"}
        if self.sequence_parallel is not None or not several:
            return self._task(workload, mesh)
        along = workload.model_copy(update={"sequence_parallel": True})
        return self._task(workload, mesh, along=partial(self._task, along, mesh))

    @cached_property
    def spreads(self) -> bool:
        """Whether the model has mixtures whose experts can be spread over ranks of `ep`."""
        at = bool(self.sequence_parallel), False
        if at not in self._traces:
            self.on({TP: 1}, "ddp", None)
        try:
            self._spread[at] = spread_experts(self._traces[at])
        except InfeasibleError:
            return False
        return True

    def _task(
        self, workload: Workload, mesh: Mapping[str, int], along: Callable[[], Task] | None = None
    ) -> Task:
        """Return a task, of a model that is traced for the first task like it.

        The trace keeps all repeated blocks if their code depends on the index of the block.
        """
        at = workload.sequence_parallel, mesh.get(CP, 1) > 1
        began = time.monotonic()
        late = self.until + max(self.until - began, 0)  # a late plan is better than none
        with traced_until(math.inf if self._traces else late):
            found = self._traces.get(at) or self._trace(*at)
            task = self._of_trace(found, workload, mesh, along)
            if at not in self._traces and task.dry.numbered:
                found = self._unfolded(found, *at)
                task = self._of_trace(found, workload, mesh, along)
        for _ in range(0 if at in self._traces or any(at) else MAX_ROUNDS):
            now = time.monotonic()
            if now + TIMES_THE_LAST_TRACE * (now - began) > self.until:
                break
            began = now
            longer = _at_other_lengths(found, task)
            if longer is found:
                break
            found, task = longer, self._of_trace(longer, workload, mesh, along)
        self._traces[at] = found
        if workload.spread == 1:
            return task
        self._spread[at] = self._spread.get(at) or spread_experts(found)
        return self._of_trace(self._spread[at], workload, mesh, along)

    def _trace(self, along_sequence: bool, by_rows: bool, folds: bool = True) -> Traced:
        """Trace the model. To shard sequences it makes fewer runs (`Source.along_sequence`)."""
        stage("trace")
        firsts = self.recompute if isinstance(self.recompute, Mapping) else {}
        trains = "train" in self.workload.phases
        source = replace(self.source, trains=trains, recomputed=firsts, pins=self.pins)
        if along_sequence or by_rows:
            source = source.along_sequence(by_rows)
        found = trace_model(source, folds, _is_numbered)
        return found._replace(unmasked=bool(source.masks() - found.source.masks()))

    def _unfolded(self, found: Traced, along_sequence: bool, by_rows: bool) -> Traced:
        """Trace all blocks, with the calls that could be traced with folded ones if that works."""
        with suppress(ModelError):
            again = trace_folded(found.source, known=Known(folds=False))
            return again._replace(unmasked=found.unmasked)
        return self._trace(along_sequence, by_rows, folds=False)

    def _of_trace(
        self,
        found: Traced,
        workload: Workload,
        mesh: Mapping[str, int],
        along: Callable[[], Task] | None,
    ) -> Task:
        """Return a task, with the axes that the mesh needs."""
        stage("axes")
        axes, sequence = self._refined(found.graph, workload, mesh)
        stage("trace")
        given = workload, mesh, self.pins, sequence, found.unmasked, along
        task = Task(found.source, found.unfolded, axes, *given)
        return self._with_recomputation(task, found, along)

    def _refined(
        self, graph: Graph, workload: Workload, mesh: Mapping[str, int]
    ) -> tuple[Axes, OpenSequence | None]:
        """Return the axes of a graph, once for all meshes that need no other units of axes."""
        tp, cp = mesh[TP], mesh.get(CP, 1)
        length = TRACE_SEQ if workload.sequence_parallel or cp > 1 else None

        def refined(ranks: int) -> tuple[list[Op], Axes, OpenSequence | None]:
            axes = refine(graph, length)
            align(graph, axes, ranks)
            keep_beside_lost(graph, axes)
            keep_beside_unguarded(graph, axes)
            sequence = open_sequence(graph, axes, length, cp == 1) if length else None
            return graph.ops, axes, sequence  # the ops keep their id

        at = id(graph.ops), length, cp == 1  # graphs that differ in marks of mixtures share ops
        found = made_once(self._axes, (*at, None), lambda: refined(1))
        units = misaligned(graph, found[1], tp)
        return made_once(self._axes, (*at, units or None), lambda: refined(tp))[1:]

    def _with_recomputation(
        self, task: Task, found: Traced, along: Callable[[], Task] | None
    ) -> Task:
        """Return a task for training with the blocks that are computed again, or with the choice.

        Raises:
            UsageError: the model has no such blocks.
        """
        workload, asked = task.workload, self.recompute
        if asked is False or "train" not in workload.phases:
            return task
        blocks = task.recomputable if asked is None else _recomputed(task, asked)
        if not blocks:
            return task

        def computing(firsts: Mapping[str, int]) -> Task:
            again = workload.model_copy(update={"recomputed": dict(firsts)})
            source = replace(found.source, recomputed=firsts)
            of = _of_other_source(found, source)
            of = of if workload.spread == 1 else spread_experts(of, found)
            return self._of_trace(of, again, task.mesh, along)

        if asked is None:
            return task if workload.recomputed else replace(task, recomputing=computing)
        return replace(task, workload=workload.model_copy(update={"recomputed": blocks}))


def _is_numbered(found: Traced) -> bool:
    """Return whether code of the plain call depends on the index of a block that was folded."""
    plain = replace(found.source, more=(), further=(), keeps=False)
    return DryRuns(plain, found.unfolded).numbered


def _recomputed(task: Task, asked: Mapping[str, int] | bool) -> dict[str, int]:
    """Return the lists of blocks to compute again, with the number of blocks; True asks for all.

    Raises:
        UsageError: there are no such blocks, or not so many.
    """
    found = task.recomputable
    firsts = dict(asked) if isinstance(asked, Mapping) else found
    wrong = [path for path, n in firsts.items() if not 0 < n <= found.get(path, 0)]
    if firsts and not wrong:
        return firsts
    lists = wrong or recomputable(task.source.module)
    stateful = next(chain.from_iterable(map(task.stateful, lists)), None)
    if stateful is not None:
        raise UsageError(
            f"recompute: '{stateful:.80}' may do something else if it runs again for the backward "
            "pass, because it changes a buffer, what it is given, or an attribute that its next "
            "call reads: leave this list of blocks out"
        )
    raise UsageError(
        f"recompute: {wrong[0]!r:.80} is no list of so many blocks that can be computed again; "
        f"there are {found or 'none'}"
        if wrong
        else "recompute: the model has no list of blocks that can be computed again (of "
        "transformers' GradientCheckpointingLayer): plan without it"
    )
