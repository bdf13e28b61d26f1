"""Compares a plan key by key with the plan that the planner would write for the same states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.names import lookup, pattern
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.contract.styles import LOCAL, UNCHANGED
from shardwright.planner.emit.drawing import drawing
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import folded
from shardwright.planner.emit.reasons import replicated_parameters
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.emitted_plan import derived_keys
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import UnfoldedSolution

FIGURES = ("cost", "predicted", "drawing", "replicated", "opaque")
"""Keys that describe a plan and that the runtime does not use."""

FOLLOWS = (
    "; `shardwright check --accept` writes what it finds; a plan that was made with --inputs is "
    "checked with the same"
)
"""The hint for a key that does not follow from the rest of the plan."""

ACCEPTED = "edited: right, but not what a solver found"
"""The note of an accepted plan whose costs differ from the solver's."""


def expected_keys(
    task: Task,
    layouts: Layouts,
    there: UnfoldedSolution,
    modules: Mapping[str, ModulePlan],
    optimum: Optimum,
) -> dict[str, Any]:
    """Return the keys of a plan as `derived_keys` has them, and its costs, drawing and reasons.

    `optimum` is the solver's answer with these states.
    """
    unfolded, bill = there.layouts, there.bill
    whole = {u.stored: True for u in unfolded.graph.uses}
    found = derived_keys(task, layouts, there, modules)
    return found | {
        "model": found["model"].model_dump(),
        "calls": [call.model_dump() for call in found["calls"]],
        "predicted": found["predicted"].model_dump(),
        "drawing": [b.model_dump() for b in drawing(unfolded, bill)],
        "cost": [optimum.objective, *bill.price],
        "replicated": [w.model_dump() for w in replicated_parameters(unfolded, whole)],
    }


def same(root: nn.Module, plan: Plan, found: Mapping[str, Any], figures: bool) -> None:
    """Compare a plan with the keys that it should have.

    Args:
        root: The model.
        plan: The plan.
        found: The result of `expected_keys`.
        figures: Whether to compare derived keys too: costs, and what a plan has for direct calls of
            modules and for hooks. Older plans do not have the latter.

    Raises:
        PlanError: a key has another value; the message names it.
    """
    have, want = {"fsdp": [], **plan.model_dump()}, dict(found)
    if figures:
        want["modules"] = {n: m.model_dump() for n, m in found["modules"].items()}
    else:
        have["modules"], want["modules"] = done(root, plan.modules), done(root, found["modules"])
    for key, value in want.items():
        if key in (*FIGURES, "calls") and not figures:
            continue
        where = _differs(have, key, value)
        if where is not None:
            place, said, due = where
            follows = key in (*FIGURES, "calls") or SAID.keys() & {*place.split(".")}
            hint = FOLLOWS if follows else ""
            raise PlanError(f"the plan does not hold: {place} is {said}, and should be {due}{hint}")


def rewritten(plan: Plan, found: Mapping[str, Any]) -> Plan:
    """Return the plan with updated figures and digest.

    If its costs differ from its solver report, the report no longer says that it is optimal.
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


SAID = {"takes": [], "gives": [], "varies": False, "no_gradient": [], "unknown": []}
"""Keys of a module's plan that are only for direct calls and hooks, with their empty values."""


def done(root: nn.Module, modules: Mapping[str, ModulePlan]) -> dict[str, Any]:
    """Return the plans of modules without the keys that are only for direct calls and hooks."""
    names = [n for n, _ in root.named_modules()]
    found = {n: m for n in names if (m := lookup(modules, n)) is not None}
    does = {n: m for n, m in found.items() if m.changes or m.layer not in (LOCAL, UNCHANGED)}
    bare = {n: m.model_copy(update=SAID) for n, m in does.items()}
    spoken = folded(root, bare)
    known = {n if n in modules else pattern(n) for n in found}
    spoken |= {n: m for n, m in modules.items() if n not in known}  # to differ: no such module
    return {n: m.model_dump() for n, m in spoken.items()}


def _differs(have: Mapping[str, Any], key: str, want: Any) -> tuple[str, str, str] | None:
    """Return the `difference` of one of the keys of `expected_keys`."""
    if key == "cost":  # the first number depends on a price of a byte that is not in the plan
        return difference(have["solver"]["objective"][1:], want[1:], "solver.objective")
    if key == "batch_dims":
        return difference(sorted(have[key]), sorted(want), key)
    if key == "replicated":
        return difference(_without_reasons(have[key]), _without_reasons(want), key)
    return difference(have[key], want, key)


def difference(have: Any, want: Any, where: str) -> tuple[str, str, str] | None:
    """Return the first path at which two JSON values differ, with both values; None if equal."""
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
