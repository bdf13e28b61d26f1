"""What holds a parameter in place: what each alternative would cost, or what forbids it.

The model is traced again, and the problem solved with each alternative pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.api import as_planned, prepare
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan, Prediction
from shardwright.planner.emit import Layouts
from shardwright.planner.problem.conventions import token_tables
from shardwright.planner.problem.infeasible_core import Contradiction
from shardwright.planner.problem.pins import Pin, matches, parameters
from shardwright.planner.report.tied import Link, tied_to
from shardwright.planner.search.search import Search
from shardwright.planner.strategies.states import States
from shardwright.planner.wording import is_split, placement_in_words
from shardwright.runtime.identity import check_identity


@dataclass(frozen=True)
class Alternative:
    """Another placement: how much more it would take than the plan, or why it cannot be.

    `bytes` are those of the fullest rank, `collectives` those of all passes together.
    """

    placement: str
    bytes: int = 0
    time_ns: int = 0
    collectives: int = 0
    impossible: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Explanation:
    """Parameters that a plan treats alike, and what keeps them as they are.

    `together` names the parameters that share the axes which are split here, and their dim; `ties`
    says of each why: the shortest chain of ops from this parameter to that one. `whole` is what the
    plan itself gives as the reason that a large one is whole, `convention` says that one of
    `planner/problem/conventions.py` settled it, whatever the alternatives take.
    """

    name: str
    shape: list[int]
    count: int
    placement: str
    pinned: str | None
    whole: str | None = None
    convention: bool = False
    together: list[str] = field(default_factory=list)
    ties: dict[str, list[Link]] = field(default_factory=dict)
    alternatives: list[Alternative] = field(default_factory=list)


def explain(plan: Plan, name: str, model: Any) -> list[Explanation]:
    """Explain the placement of the parameter, or of each below the module, of that name.

    Args:
        plan: The plan; its workload and mesh are what is priced.
        name: As in a pin: `*` stands for any part of a name between dots.
        model: What the plan was made for, as `shardwright.plan` takes it.

    Raises:
        UsageError: nothing has that name.
        PlanError: the plan is for another model.
    """
    search = prepare(model, **as_planned(plan))
    check_identity(search.source.module, plan)
    # Of blocks that are alike the graph may have one alone, so names are those of the module.
    every = [n for n, _ in search.source.module.named_parameters(remove_duplicate=False)]
    counts = Counter(_group(plan, fqn) for fqn in every)
    asked = dict.fromkeys(_group(plan, fqn) for fqn in every if matches(name, fqn))
    if not asked:
        parameters(search.graph, name)
        raise UsageError(f"'{name}' has buffers only, and every rank holds those whole")
    _catch_up(search, plan)
    _, network, pinned = search.problem()
    usual = token_tables(search.graph, network.states).keys() - pinned.keys()
    return [_explain(search, plan, network.states, g, counts[g], usual) for g in asked]


def from_plan(plan: Plan, name: str) -> list[Explanation]:
    """What the plan alone says of it: no alternatives.

    Raises:
        UsageError: nothing has that name.
    """
    wanted = pattern(name)
    groups = [n for n in plan.model.parameters if matches(wanted, pattern(n))]
    if not groups:
        raise UsageError(f"the plan knows no parameter or module '{name}'")
    return [
        Explanation(
            name=group,
            shape=plan.model.parameters[group],
            count=1,
            placement=_placement(plan, group)[0],
            pinned=next((f"{n}={p}" for n, p in plan.pins.items() if matches(n, group)), None),
            whole=next((w.reason for w in plan.replicated if pattern(w.parameter) == group), None),
        )
        for group in groups
    ]


def _group(plan: Plan, fqn: str) -> str:
    """The name under which the plan has a parameter: like layers under one."""
    owner = fqn.rpartition(".")[0]
    return fqn if owner in plan.modules and owner != pattern(owner) else pattern(fqn)


def _catch_up(search: Search, plan: Plan) -> None:
    """Let the search learn again what failed its trial when the plan was made."""
    if search.solve(None, 60.0, None).report.objective != plan.solver.objective:
        search.run(None, 60.0, None)


def _explain(
    search: Search, plan: Plan, states: States, group: str, count: int, usual: Collection[str]
) -> Explanation:
    traced = [u.fqn for u in search.graph.uses if not u.is_buffer]
    names = [n for n in traced if _group(plan, n) == group]
    names = names or [n for n in traced if pattern(n) == pattern(group)]
    stored = next(u.stored for u in search.graph.uses if u.fqn == names[0])
    words, now = _placement(plan, names[0])
    held = [f"{n}={p}" for n, p in plan.pins.items() if names[0] in parameters(search.graph, n)]
    shape = search.graph.tensors[stored].shape
    others = [d for d in (None, *range(len(shape))) if d != now]
    layouts = Layouts(search.graph, states, {})
    tied = {} if now is None else tied_to(plan, layouts, names[0], now)
    return Explanation(
        name=group,
        shape=list(shape),
        count=count,
        placement=words,
        pinned=held[0] if held else None,
        whole=next(
            (w.reason for w in plan.replicated if pattern(w.parameter) == pattern(group)), None
        ),
        convention=stored in usual and now == 0,
        together=[*tied],
        ties=tied,
        alternatives=[_alternative(search, plan, names, dim) for dim in others],
    )


def _placement(plan: Plan, fqn: str) -> tuple[str, int | None]:
    """In words, and the dim that is split."""
    owner, _, key = fqn.rpartition(".")
    spec = plan.module(owner)
    entry = spec.parameters.get(key) if spec else None
    if spec is None or entry is None:
        return "whole", None
    cut = [i for i, dim in enumerate(parse(entry.placement).dims) if is_split(dim)]
    return placement_in_words(spec.layer, entry), cut[0] if cut else None


def _alternative(search: Search, plan: Plan, names: list[str], dim: int | None) -> Alternative:
    """What the best plan with these parameters placed otherwise would cost."""
    asked = search.pins
    kept = [
        Pin(fqn, pin.dim)
        for pin in asked
        for fqn, stored in parameters(search.graph, pin.name).items()
        if not _same(search, stored, names)
    ]
    placement = Pin("", dim).placement
    search.pins = (*kept, *(Pin(n, dim) for n in names))
    try:
        found = search.predicted(search.solve(None, 60.0, None))
    except Contradiction as error:
        return Alternative(placement, impossible=error.reasons)
    except InfeasibleError as error:
        return Alternative(placement, impossible=[str(error).rpartition("cannot be split: ")[2]])
    finally:
        search.pins = asked
    was = plan.predicted
    return Alternative(
        placement,
        max(found.parameter_bytes) - max(was.parameter_bytes),
        found.time_ns - was.time_ns,
        _calls(found) - _calls(was),
    )


def _same(search: Search, stored: str, names: Iterable[str]) -> bool:
    """Whether one of these parameters, or a tied one, is stored in that tensor; or a buffer is."""
    uses = [u for u in search.graph.uses if u.stored == stored]
    return any(u.fqn in names or u.is_buffer for u in uses)


def _calls(predicted: Prediction) -> int:
    return sum(c.count for c in predicted.collectives)
