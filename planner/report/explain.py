"""Explains a parameter's placement: what each alternative would cost, or what forbids it.

The model is traced again, and the problem is solved with each alternative pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.errors import InfeasibleError, SolverError, UsageError
from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.names import lookup, pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_figures import Prediction
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.garbage import uncollected
from shardwright.planner.graph.ties import ties
from shardwright.planner.graph.views import is_move
from shardwright.planner.prepare import as_planned, prepare
from shardwright.planner.problem.conventions import TABLES, token_tables
from shardwright.planner.problem.infeasible_core import Contradiction
from shardwright.planner.problem.pins import Pin, matches, parameters
from shardwright.planner.report.quantized_cuts import stored_in_words
from shardwright.planner.search.ladder import LADDER, SOLVING, climb
from shardwright.planner.search.restrictions import Restrictions, formulate
from shardwright.planner.search.search_state import SearchState, start
from shardwright.planner.search.solution import SolverOptions, predicted
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.states import States
from shardwright.planner.wording import objective_in_words, parameter_in_words
from shardwright.runtime.model.identity import check_identity

SECONDS = 30.0
"""Time limit for each alternative."""


@dataclass(frozen=True)
class Link:
    """An op in a chain that ties two parameters together; if it `moves`, it computes nothing."""

    op: str
    module: str
    source: str
    moves: bool


@dataclass(frozen=True)
class Alternative:
    """Another placement: its extra cost compared with the plan, or why it is impossible.

    `bytes` are those of the fullest rank, `collectives` those of all passes together. `solved` is
    false if the best plan with this placement was not found in time.
    """

    placement: str
    bytes: int = 0
    time_ns: int = 0
    collectives: int = 0
    impossible: list[str] = field(default_factory=list)
    solved: bool = True

    @property
    def priced(self) -> bool:
        """Whether its cost is known."""
        return self.solved and not self.impossible


@dataclass(frozen=True)
class Explanation:
    """Parameters that a plan places equally, and the reasons.

    Attributes:
        name: The parameter, `*` for a layer number.
        shape: Its unsharded shape.
        count: How many parameters have that name.
        placement: How the plan places them.
        objective: What the plan minimizes.
        pinned: The pin that asks for the placement.
        stored: How it is held if it is quantized, and where cuts fall among its blocks.
        replicated: The plan's reason for replicating it, if it is large.
        convention: Whether a convention (`planner/problem/conventions.py`) settled it.
        together: Parameters, with their dim, that must be split along the same axes.
        ties: The shortest chain of ops to each of these.
        alternatives: The other placements.
    """

    name: str
    shape: list[int]
    count: int
    placement: str
    objective: str
    pinned: str | None = None
    stored: str | None = None
    replicated: str | None = None
    convention: bool = False
    together: list[str] = field(default_factory=list)
    ties: dict[str, list[Link]] = field(default_factory=dict)
    alternatives: list[Alternative] = field(default_factory=list)


def explain(
    plan: Plan | str | Path,
    name: str,
    model: Any,
    trust_remote_code: bool = False,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    **hub: Any,
) -> list[Explanation]:
    """Explain the placement of a parameter, or of each parameter in a module.

    Args:
        plan: The plan, with the workload and mesh that are priced, or its file.
        name: The name as in a pin: `*` stands for any part of a name between dots.
        model: The model it was made for, as `shardwright.plan` takes it.
        trust_remote_code: Whether to run code that is shipped with the model.
        args: Example inputs, as given for the plan.
        kwargs: Example inputs by name.
        **hub: `revision`, `cache_dir`, `local_files_only`, `token`, as `plan` takes them.

    Raises:
        UsageError: nothing has that name.
        PlanError: the plan is for another model.
    """
    how = {"args": args, "kwargs": kwargs, "trust_remote_code": trust_remote_code, **hub}
    plan = Plan.load(plan)
    if not isinstance(name, str):
        raise UsageError(f"give the name of a parameter or module as text, not {name!r:.60}")
    return explained(plan, made(plan, model, **how), [name])


@uncollected()
def made(plan: Plan, model: Any, **how: Any) -> SearchState:
    """Repeat the search for the plan, with `model` as `prepare` takes it; return its end state.

    Choices that failed a dry run in the search are forbidden again.

    Raises:
        PlanError: the plan is for another model.
        ModelError: the model cannot be read or traced.
    """
    task, asked = prepare(model, **as_planned(plan), **how), asked_for(plan)
    check_identity(task.source.module, plan)
    now = climb(start(task, asked), SOLVING)
    if now.solution.report.objective != plan.solver.objective:
        learnt = Restrictions(task.pins, gathered=now.restrictions.gathered)
        now = climb(start(task, asked, learnt, now.formulation), LADDER)
        now.plan  # noqa: B018 raises if there is no plan, and says why
    return now


@uncollected()
def explained(plan: Plan, made: SearchState, names: Sequence[str]) -> list[Explanation]:
    """Explain several names, from the end state of the plan's search.

    Raises:
        UsageError: nothing has one of these names.
    """
    task = made.task
    # The graph may have only one of several equal blocks, so the names are the module's.
    every = [n for n, _ in task.source.module.named_parameters(remove_duplicate=False)]
    counts = Counter(_group(plan, fqn) for fqn in every)
    asked: dict[str, None] = {}
    for name in names:
        found = dict.fromkeys(_group(plan, fqn) for fqn in every if matches(name, fqn))
        if not found:
            parameters(task.graph, name)
            raise UsageError(f"'{name}' has buffers only, and those stay replicated")
        asked |= found
    free = replace(made.restrictions, conventions=frozenset())
    posed = formulate(task, free, made.formulation)
    usual = token_tables(task.graph, posed.network.states).keys() - posed.pinned.keys()
    usual = usual if TABLES in asked_for(plan).conventions else set()
    return [_explain(plan, made, posed.network.states, g, counts[g], usual) for g in asked]


def from_plan(plan: Plan, name: str) -> list[Explanation]:
    """Explain from the plan only, without alternatives.

    Raises:
        UsageError: nothing has that name.
    """
    wanted = pattern(name)
    groups = [n for n in plan.model.parameters if matches(wanted, pattern(n))]
    if not groups:
        raise UsageError(f"the plan knows no parameter or module '{name}'")
    return [_of_plan(plan, group, group) for group in groups]


def _of_plan(plan: Plan, group: str, one: str, count: int = 1) -> Explanation:
    """Return what the plan alone says of a group of parameters, of which `one` is one."""
    return Explanation(
        name=group,
        shape=lookup(plan.model.parameters, one) or [],
        count=count,
        placement=parameter_in_words(plan, one),
        objective=objective_in_words(plan.objective),
        pinned=next((f"{n}={p}" for n, p in plan.pins.items() if matches(n, one)), None),
        stored=stored_in_words(plan, one),
        replicated=plan.reason(group),
    )


def _group(plan: Plan, fqn: str) -> str:
    """Return the plan's name for a parameter; equal layers share one name."""
    owner = fqn.rpartition(".")[0]
    return fqn if owner in plan.modules and owner != pattern(owner) else pattern(fqn)


def asked_for(plan: Plan) -> SolverOptions:
    """Return the options that the plan was made with."""
    return SolverOptions(memory=plan.objective.memory_bytes, objective=plan.objective.name)


def _explain(
    plan: Plan, made: SearchState, states: States, group: str, count: int, usual: Collection[str]
) -> Explanation:
    task = made.task
    traced = [u.fqn for u in task.graph.uses if not u.is_buffer]
    names = [n for n in traced if _group(plan, n) == group]
    names = names or [n for n in traced if pattern(n) == pattern(group)]
    stored = next(u.stored for u in task.graph.uses if u.fqn == names[0])
    now = _split_dim(plan, names[0])
    dims = range(len(task.graph.tensors[stored].shape))
    others = [d for d in (None, *dims) if d != now]
    layouts = Layouts(task.graph, states, {})
    tied = {} if now is None else tied_to(plan, layouts, names[0], now)
    return replace(
        _of_plan(plan, group, names[0], count),
        convention=stored in usual and now == 0,
        together=[*tied],
        ties=tied,
        alternatives=[_alternative(plan, made, names, dim) for dim in others],
    )


def _split_dim(plan: Plan, name: str) -> int | None:
    """Return the first dim of a parameter that the plan shards; None if it is replicated."""
    entry = plan.parameter(name)
    dims = parse(entry.placement).dims if entry else ()
    return next((i for i, dim in enumerate(dims) if is_split(dim)), None)


def _alternative(plan: Plan, made: SearchState, names: list[str], dim: int | None) -> Alternative:
    """Return the cost of the best plan in which these parameters are split along `dim`."""
    task, learnt = made.task, made.restrictions
    kept = [
        Pin(fqn, pin.dim)
        for pin in learnt.pins
        for fqn, stored in parameters(task.graph, pin.name).items()
        if not _same(task, stored, names)
    ]
    placement = Pin("", dim).placement
    pinned = replace(learnt, pins=(*kept, *(Pin(n, dim) for n in names)))
    asked = replace(asked_for(plan), solver="backtracking", seconds=SECONDS)
    try:
        there = climb(start(task, asked, pinned, made.formulation), SOLVING).solution
    except Contradiction as error:
        return Alternative(placement, impossible=error.reasons or [str(error)])
    except InfeasibleError as error:
        return Alternative(placement, impossible=[str(error).rpartition("cannot be split: ")[2]])
    except SolverError:
        return Alternative(placement, solved=False)
    if not there.optimum.optimal:
        return Alternative(placement, solved=False)
    found, was = predicted(task, there.layouts, there.unfolded), plan.predicted
    return Alternative(
        placement,
        max(found.parameter_bytes) - max(was.parameter_bytes),
        found.time_ns - was.time_ns,
        _calls(found) - _calls(was),
    )


def _same(task: Task, stored: str, names: Iterable[str]) -> bool:
    """Return whether the tensor `stored` holds one of the parameters `names`, or a buffer."""
    uses = [u for u in task.graph.uses if u.stored == stored]
    return any(u.fqn in names or u.is_buffer for u in uses)


def _calls(predicted: Prediction) -> int:
    return sum(c.count for c in predicted.collectives)


def tied_to(plan: Plan, layouts: Layouts, fqn: str, dim: int) -> dict[str, list[Link]]:
    """Find the parameters that must be split with a dim of this one: "a.weight, dim 0".

    Each is returned with the shortest chain of ops to it. Of equal layers the nearest counts.

    Args:
        plan: The plan that splits it.
        layouts: Graph and axes of the model.
        fqn: The parameter.
        dim: The number of its dim.
    """
    graph, states = layouts.graph, layouts.states
    stored = {u.fqn: u.stored for u in graph.uses if not u.is_buffer}
    start = stored[fqn]
    chains = ties(graph, states.axes, (start, dim), _split_axes(plan, layouts, fqn, start))
    found: dict[str, list[Link]] = {}
    for other, name in stored.items():
        if name == start or pattern(other) == pattern(fqn):
            continue
        for i in range(len(graph.tensors[name].shape)):
            if (name, i) in chains:
                links = [
                    Link(op.call.op, op.module, op.source, is_move(op.call))
                    for op in chains[name, i]
                ]
                key = f"{pattern(other)}, dim {i}"
                found[key] = min(found.get(key, links), links, key=len)
    return dict(sorted(found.items()))


def _split_axes(plan: Plan, layouts: Layouts, fqn: str, stored: str) -> list[int]:
    """Return the axes along which the plan splits a parameter, from the state of its placement."""
    entry = plan.parameter(fqn)
    domain = layouts.states.domain(stored)
    for state in domain:
        if entry and str(layouts.placement(stored, state, stored=True)) == entry.placement:
            return sorted({axis for _, axis, _ in state.shards})
    return []
