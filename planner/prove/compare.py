"""What a plan says beside what the planner would write: key by key, the first that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import batch_dims
from shardwright.planner.contract.names import lookup, pattern
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.contract.styles import LOCAL, UNCHANGED
from shardwright.planner.cost.cost import Costs
from shardwright.planner.emit.drawing import drawing
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import folded, shapes
from shardwright.planner.emit.prediction import prediction
from shardwright.planner.emit.reasons import replicated_parameters
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.plan import of_all_blocks, traced_calls, without_rule
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import memory_of
from shardwright.planner.verify.recost import Bill

FIGURES = ("cost", "predicted", "drawing", "replicated", "opaque")
"""What a plan says of itself, and nobody acts on."""

FOLLOWS = "; `shardwright check --accept` writes what it finds"
"""What to do where something is not what follows from the rest of a plan."""

ACCEPTED = "edited: right, but not what a solver found"
"""The note of a plan that costs something else than what was found."""


def expected_keys(
    task: Task,
    layouts: Layouts,
    unfolded: Layouts,
    bill: Bill,
    modules: Mapping[str, ModulePlan],
    costs: Costs,
    optimum: Optimum,
) -> dict[str, Any]:
    """The keys of the plan that such states make: all that follow from them.

    Args:
        task: What was traced.
        layouts: Of its folded graph.
        unfolded: Of that of all blocks.
        bill: Of the same.
        modules: Plans of the traced modules.
        costs: Prices of the folded graph.
        optimum: The states as a solver found them.
    """
    whole = {u.stored: True for u in unfolded.graph.uses}
    memory = memory_of(task, bill, layouts, costs)
    found = prediction(layouts, bill, memory, task.ranks(layouts.states))
    return {
        "model": {
            "architecture": task.source.architecture,
            "config_hash": task.source.config_hash,
            "parameters": shapes(task.source.module),
        },
        "batch_dims": batch_dims(task.mesh),
        "sub_axes": layouts.states.sub.table(),
        "modules": of_all_blocks(task, modules),
        "calls": [call.model_dump() for call in traced_calls(task, layouts)],
        "opaque": without_rule(task.graph, task.axes),
        "predicted": found.model_dump(),
        "drawing": [b.model_dump() for b in drawing(unfolded, bill)],
        "cost": [optimum.objective, *bill.price],
        "replicated": [w.model_dump() for w in replicated_parameters(unfolded, whole)],
    }


def same(root: nn.Module, plan: Plan, found: Mapping[str, Any], figures: bool) -> None:
    """Compare a plan with the keys that it should have.

    Args:
        root: The model.
        plan: The plan.
        found: Those of `expected_keys`.
        figures: Whether to compare what follows from others, too: what it says of its costs, and of
            calls of modules by themselves and hooks on them, of which older plans say nothing.

    Raises:
        PlanError: a key is not what it should be; says which.
    """
    have, want = plan.model_dump(), dict(found)
    if figures:
        want["modules"] = {n: m.model_dump() for n, m in found["modules"].items()}
    else:
        have["modules"], want["modules"] = done(root, plan.modules), done(root, found["modules"])
    for key, value in want.items():
        if key in (*FIGURES, "calls") and not figures:
            continue
        where = _differs(have, key, value)
        if where is not None:
            hint = FOLLOWS if key in FIGURES or _follows(where[0]) else ""
            place, said, due = where
            raise PlanError(f"the plan does not hold: {place} is {said}, and should be {due}{hint}")


def rewritten(plan: Plan, found: Mapping[str, Any]) -> Plan:
    """The plan with its figures as they come out, and its digest.

    Where it costs something else than what its solver found, nobody has proven it the best.
    """
    data = plan.model_dump() | {key: found[key] for key in ("modules", "calls")}
    for key in FIGURES:
        if _differs(data, key, found[key]) is None:
            continue
        if key == "cost":
            size = found[key][0]
            data["solver"] |= {
                "status": "feasible", "objective": found[key], "bound": [0], "gap": size,
                "note": ACCEPTED, "proved_by": "",
            }  # fmt: skip
        else:
            data[key] = found[key]
    return Plan.model_validate(data).sealed()


SAID = {"takes": [], "gives": [], "varies": False, "each": [], "no_gradient": [], "unknown": []}
"""What a module's plan says of calls by themselves and hooks alone, where it says nothing."""


def done(root: nn.Module, modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
    """What modules do in the model, without what is said of calls by themselves and hooks alone."""
    names = [n for n, _ in root.named_modules()]
    found = {n: m for n in names if (m := lookup(modules, n)) is not None}
    does = {n: m for n, m in found.items() if m.changes or m.layer not in (LOCAL, UNCHANGED)}
    bare = {n: m.model_copy(update=SAID) for n, m in does.items()}
    spoken = folded(root, bare)
    known = {n if n in modules else pattern(n) for n in found}
    spoken |= {n: m for n, m in modules.items() if n not in known}  # of no module: that differs
    return {n: m.model_dump() for n, m in spoken.items()}


def _follows(place: str) -> bool:
    return place.startswith("calls") or bool(SAID.keys() & {*place.split(".")})


def _differs(have: Mapping[str, Any], key: str, want: Any) -> tuple[str, str, str] | None:
    """`difference` of one of the keys of `expected_keys`."""
    if key == "cost":  # the first number is at a price of a byte that the plan does not name
        return difference(have["solver"]["objective"][1:], want[1:], "solver.objective")
    if key == "batch_dims":
        return difference(sorted(have[key]), sorted(want), key)
    if key == "replicated":
        return difference(_without_reasons(have[key]), _without_reasons(want), key)
    return difference(have[key], want, key)


def difference(have: Any, want: Any, where: str) -> tuple[str, str, str] | None:
    """The first place where two JSON values differ, with what stands there in each."""
    if isinstance(have, dict) and isinstance(want, dict):
        for key in sorted(have.keys() | want.keys()):
            if key not in have or key not in want:
                sides = (_text(side[key]) if key in side else "missing" for side in (have, want))
                return (f"{where}.{key}", *sides)  # type: ignore[return-value]
            found = difference(have[key], want[key], f"{where}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(have, list) and isinstance(want, list) and len(have) == len(want):
        pairs = enumerate(zip(have, want, strict=True))
        return next((d for i, p in pairs if (d := difference(*p, f"{where}.{i}"))), None)
    return None if have == want else (where, _text(have), _text(want))


def _without_reasons(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "reason"} for entry in entries]


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
