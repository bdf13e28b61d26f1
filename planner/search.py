"""Solve, check, try on meta; what fails its trial is forbidden, and the rest solved again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, reduce
from importlib.metadata import version
from math import prod
from operator import or_
from typing import TypeVar

from torch import nn

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner import solvers
from shardwright.planner.audit.bill import Bill
from shardwright.planner.audit.budget import largest
from shardwright.planner.audit.check import check
from shardwright.planner.audit.first_run import of_first_run
from shardwright.planner.emit import (
    Differs,
    Layouts,
    count,
    folded,
    module_plans,
    rank_bytes,
    shapes,
    wholes,
)
from shardwright.planner.folding.folding import Folding
from shardwright.planner.folding.unfolding import Unfolded, unfold
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.layout import Coords, Dim, coords_of, dim_size
from shardwright.planner.network.conventions import Usual, follow, projections, token_tables
from shardwright.planner.network.gathered import unsplittable
from shardwright.planner.network.network import BACKWARD, BYTES, TIME, Network, build_network
from shardwright.planner.network.optimize import SLACK, Optimum, optimize
from shardwright.planner.network.pins import Pin, as_table, resolve, restrict
from shardwright.planner.network.refusal import refuse
from shardwright.planner.network.within import OverMemory, within
from shardwright.planner.plan_file import (
    Memory,
    ModelIdentity,
    ModulePlan,
    Plan,
    Prediction,
    SolverReport,
    Workload,
)
from shardwright.planner.pricing.cost import Costs
from shardwright.planner.pricing.memory import memory as measure
from shardwright.planner.solvers.simplify import Simplified, simplify
from shardwright.planner.stages import figures, stage
from shardwright.planner.states.mesh_dims import TP, batch_dims
from shardwright.planner.states.sequence import OpenSequence
from shardwright.planner.states.states import States
from shardwright.planner.states.sub_dims import find_sub_dims
from shardwright.planner.tracing.calls import Calls
from shardwright.planner.tracing.on_fake import calls_of
from shardwright.planner.tracing.opaque import Opaque
from shardwright.planner.tracing.source import Source
from shardwright.planner.trial.attributes import Unsolvable, local_attributes
from shardwright.planner.trial.blame import Blame, Failure, Splits
from shardwright.planner.trial.verify import Mismatch, run_local
from shardwright.planner.wording import memory_in_words

ATTEMPTS = 40
"""How often a plan that fails its trial is solved again without what failed."""

T = TypeVar("T")


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
class Search:
    """One planning run: what fails its trial is forbidden, until a plan passes."""

    source: Source
    folding: Folding
    whole: Unfolded
    axes: Axes
    workload: Workload
    mesh: Mapping[str, int]
    pins: tuple[Pin, ...] = ()
    sequence: OpenSequence | None = None
    along_sequence: Callable[[], Search] | None = None
    """Where nobody said whether hidden states are to be split along the sequence: the same so."""
    forbidden: Splits = frozenset()
    gathered: frozenset[str] = frozenset()
    """Stored tensors that may be gathered as they are read."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tensors of which a split did not pass the trial -> what went wrong."""

    @property
    def tp(self) -> int:
        """Ranks that one copy of the model is split over."""
        return self.mesh[TP]

    @property
    def graph(self) -> Graph:
        """The folded graph, on which all is decided."""
        return self.folding.graph

    @cached_property
    def blame(self) -> Blame:
        """Where trials failed so far."""
        return Blame(self.graph, self.source.architecture)

    @cached_property
    def calls(self) -> Calls | None:
        """What the code of the whole model calls."""
        return calls_of(self.source.module, self.source.runs, self.untraced)

    @cached_property
    def untraced(self) -> Opaque:
        """The modules of the whole model that are like one that was not traced."""
        found = {n: t for n, t in self.traced_names.items() if t in self.graph.untraced}
        return Opaque(self.source.module, found, self.graph.guesses)

    @cached_property
    def traced_names(self) -> dict[str, str]:
        """Module of the whole model -> the traced one that stands for it."""
        names = (n for n, _ in self.source.module.named_modules())
        return {n: self.folding.traced_name(n) for n in names}

    @cached_property
    def caches(self) -> bool:
        """Whether the model generates tokens, and keeps keys and values for that."""
        return bool(getattr(self.source.module, "can_generate", bool)())

    @cached_property
    def lookups(self) -> frozenset[str]:
        """Lookups that the runtime can replace."""
        return replaceable(self.graph, self.source.module)

    @cached_property
    def rigid(self) -> frozenset[str]:
        """Modules at whose borders nothing may change: those that run by themselves.

        A sole module is the exception: it has no modules within that could change a tensor.
        """
        root = self.source.module
        alone = {run.module for run in self.source.runs}
        return frozenset(n for n in alone if any(True for _ in root.get_submodule(n).children()))

    def run(self, solver: str | None, seconds: float, memory: int | None) -> Plan:
        """The first plan that passes its trial."""
        for _ in range(ATTEMPTS):
            outcome = self._try(self.solve(solver, seconds, memory))
            if isinstance(outcome, Plan):
                return outcome
            self.forbidden |= {(self.graph.one(name), shards) for name, shards in outcome.splits}
            self.failed |= dict.fromkeys((n for n, _ in outcome.splits), outcome.text)
        raise SolverError("no plan passed its trial on meta: please report this model")

    def blank(self, forbidden: Splits = frozenset()) -> tuple[Costs, Network]:
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
            small = simplify(network.problem)
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

    def problem(self) -> tuple[Costs, Network, dict[str, Pin]]:
        """Prices, the problem with the pins, and the pin of each stored tensor."""
        stage("problem")
        costs, network = self.blank(self.forbidden)
        wanted = resolve(self.pins, self.graph, costs.states)
        restrict(network, wanted)
        return costs, network, wanted

    def answer(
        self,
        costs: Costs,
        network: Network,
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
        small = simplify(network.problem)
        if small is None:
            refuse(network, self.graph, wanted)
            raise InfeasibleError("the rules contradict each other on this model: please report it")
        figures(
            variables=len(network.problem.names),
            constraints=len(network.problem.factors),
            simplified_variables=len(small.problem.names),
            simplified_constraints=len(small.problem.factors),
        )
        stage("solve")
        try:
            optimum = within(
                memory,
                lambda cap: optimize(small, asked, seconds, cap, backup, movable=network.movable),
                lambda values: self._held(costs, network, values).total,
                lambda values: memory_in_words(
                    self._held(costs, network, values),
                    largest(self.graph, costs, network.assignment(tuple(values))),
                ),
            )
        except SolverError:
            with suppress(SolverError):  # the facts need OR-tools, which may be what is missing
                refuse(network, self.graph, wanted)  # what has no solution need not end in time
            raise
        stage("check")
        layouts = Layouts(self.graph, costs.states, network.assignment(optimum.assignment))
        whole = self._unfolded(layouts)
        bill = Bill(self._costs(self.whole, whole.states, costs), whole.assignment)
        alike = [op for op, _ in bill.ops]
        check(whole.graph, whole.states, whole.assignment, self.rigid, alike)
        agree(bill.price, optimum)
        report = reported(optimum, solver or solvers.DEFAULT, note)
        stage("emit")
        held = self._memory(bill, layouts, costs)
        return Attempt(layouts, whole, bill, held, report, possible(network, small), wanted)

    def _costs(self, unfolded: Unfolded, states: States, folded: Costs) -> Costs:
        """Prices of an unfolded graph."""
        sent = frozenset(copy for copy, n in unfolded.origin.items() if n in folded.gathered)
        out = Costs(unfolded.graph, states.axes, states, self.workload, self.caches, sent)
        out.keys = folded.keys.unfolded(unfolded.origin)
        return out

    def _held(self, costs: Costs, network: Network, values: Sequence[int]) -> Memory:
        """Bytes that a rank of the whole model holds."""
        layouts = Layouts(self.graph, costs.states, network.assignment(tuple(values)))
        whole = self._unfolded(layouts)
        prices = self._costs(self.whole, whole.states, costs)
        return self._memory(Bill(prices, whole.assignment), layouts, costs)

    def _memory(self, bill: Bill, layouts: Layouts, folded: Costs) -> Memory:
        """Bytes that a rank holds in the first run, given the bill of the whole model."""
        short, states = self._short
        prices = self._costs(short, states, folded)
        first = of_first_run(bill)
        passing = of_first_run(Bill(prices, _of_copies(layouts.assignment, short)))
        return measure(first.costs, first.assignment, (passing.costs, passing.assignment))

    def _unfolded(self, layouts: Layouts) -> Layouts:
        """The same plan on the whole graph."""
        if self.whole.graph is self.graph:
            return layouts
        return Layouts(
            self.whole.graph, self._whole_states, _of_copies(layouts.assignment, self.whole)
        )

    @cached_property
    def _whole_states(self) -> States:
        """Axes and domains of the whole graph, with nothing forbidden: for checking and pricing."""
        sequence = self.sequence and self.sequence.unfolded(self.whole.origin, self.traced_names)
        return self._states(self.whole, sequence)

    @cached_property
    def _short(self) -> tuple[Unfolded, States]:
        """A graph with no more than three copies of a block in a row, for what passes."""
        short = unfold(self.folding, alike=3)
        return short, self._states(short, self.sequence)

    def _states(self, unfolded: Unfolded, sequence: OpenSequence | None) -> States:
        """Axes and domains of an unfolded graph."""
        graph, origin, axes = unfolded.graph, unfolded.origin, self.axes
        ops = {op.name: origin[op.name] for op in graph.ops}
        copied = Axes(
            dims=_of_copies(axes.dims, unfolded),
            axes={copy: axes.axes[op] for copy, op in ops.items() if op in axes.axes},
            rules={copy: axes.rules[op] for copy, op in ops.items()},
            conflicts=axes.conflicts,
        )
        lookups = frozenset(copy for copy, op in ops.items() if op in self.lookups)
        sub = find_sub_dims(self.graph, axes, self.tp)
        return States(graph, copied, self.tp, lookups, sequence=sequence, sub=sub)

    def predicted(self, attempt: Attempt) -> Prediction:
        """What an attempt should cost, per rank."""
        layouts = attempt.layouts
        ranks = self.ranks(layouts.states)
        sizes = {at[TP]: rank_bytes(layouts, at) for at in {r[TP]: r for r in ranks}.values()}
        bill = of_first_run(attempt.bill)
        return Prediction(
            parameter_bytes=[sizes[at[TP]] for at in ranks],
            whole_bytes=rank_bytes(layouts, None),
            memory=attempt.memory,
            time_ns=bill.price.time,
            phase_ns=bill.times,
            collectives=count(bill),
        )

    def ranks(self, states: States) -> list[Coords]:
        """Where each rank stands, on the sub-dims of tp too; the last mesh dim varies fastest."""
        table = states.sub.table()
        return [coords_of(self.mesh, table, rank) for rank in range(prod(self.mesh.values()))]

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
        result = Plan(
            model=ModelIdentity(
                architecture=source.architecture,
                config_hash=source.config_hash,
                parameters=shapes(source.module),
            ),
            mesh=dict(self.mesh),
            batch_dims=batch_dims(self.mesh),
            sub_dims=layouts.states.sub.table(),
            workload=self.workload,
            modules=folded(source.module, plans),
            whole=wholes(attempt.whole, can, pinned, self._copies(self.failed)),
            opaque=opaque(self.whole.graph, attempt.whole.states.axes),
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
        return result

    def _copies(self, facts: Mapping[str, T]) -> dict[str, T]:
        """Facts on tensors of the folded graph as facts on those of the whole one."""
        return {copy: facts[n] for copy, n in self.whole.origin.items() if n in facts}

    def _spread(self, plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
        """Plans of the modules of the whole model, from those of the traced blocks."""
        return {n: plans[t] for n, t in self.traced_names.items() if t in plans}

    def _mismatch(
        self, result: Plan, traced: Mapping[str, tuple[Dim, ...]], coords: Coords
    ) -> Mismatch | None:
        """Run the whole model as one rank; None if all is as `traced`, the layouts, says."""
        sizes = {n: tuple(dim_size(d, coords) or 0 for d in dims) for n, dims in traced.items()}
        predicted: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for module, slot, tensor in self.whole.graph.watched:
            predicted.setdefault((module, slot), []).append(sizes[self.whole.origin[tensor]])
        run = (self.source.module, self.source.runs)
        return run_local(*run, result, coords, predicted, self.untraced, self.calls)


def _of_copies(values: Mapping[str, T], unfolded: Unfolded) -> dict[str, T]:
    """The values of the copies of tensors."""
    names = unfolded.graph.tensors
    found = map(values.__getitem__, map(unfolded.origin.__getitem__, names))
    return dict(zip(names, found, strict=True))


def possible(network: Network, small: Simplified) -> dict[str, bool]:
    """Per tensor, whether any solution splits it: whether a state but the first, whole, is left."""
    return {n: any(small.source[v][1].values()) for n, v in network.variables.items()}


def replaceable(graph: Graph, root: nn.Module) -> frozenset[str]:
    """Lookups of an `nn.Embedding` in its own weight: those the runtime can replace."""
    owned = {u.used: u.fqn for u in graph.uses}
    return frozenset(
        op.name
        for op in graph.ops
        if op.call.op == "embedding"
        and owned.get(op.inputs[0]) == f"{op.module}.weight".lstrip(".")
        and isinstance(root.get_submodule(op.module), nn.Embedding)
    )


def opaque(graph: Graph, axes: Axes) -> dict[str, int]:
    """Ops without a rule, and how often each occurs in the run where it does most often."""
    runs: dict[int, Counter[str]] = {}
    for op in graph.ops:
        if axes.rules.get(op.name) is None:
            runs.setdefault(op.turn, Counter())[op.call.op] += 1
    most = reduce(or_, runs.values(), Counter[str]())
    return dict(sorted(most.items()))


def reported(optimum: Optimum, solver: str, note: str) -> SolverReport:
    """Who found the plan, and how far it is proven; where `solver` could not, that is noted."""
    if optimum.scouted and solver != "backtracking":
        note = note or f"{solver} ran out of time: planned with the backtracking solver"
    return SolverReport(
        name="backtracking" if optimum.scouted else solver,
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
