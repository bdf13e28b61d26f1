"""Lists the differences of two plans: placements, collectives and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.report import tables
from shardwright.planner.wording import collectives_in_words, costs_in_words, placement_in_words

KINDS = {
    "plan": "PLANNED FOR",
    "cost": "COST",
    "pin": "PIN",
    "placement": "PARAMETER",
    "collective": "COLLECTIVES AT",
    "number": "LOCAL NUMBER",
    "replicated": "WHY REPLICATED",
    "opaque": "OP WITHOUT A RULE",
}
"""Kind of difference -> its title in the table."""
UNLIKE = "differs by layer"


class Difference(NamedTuple):
    """One difference of two plans; `kind` is one of KINDS."""

    kind: str
    name: str
    first: str
    second: str


def differences(first: Plan | str | Path, second: Plan | str | Path) -> list[Difference]:
    """List all differences of two plans, or of their files, except those of solvers and versions.

    Raises:
        PlanError: a file is not a plan.
    """
    first, second = Plan.load(first), Plan.load(second)
    names = sorted({*first.modules, *second.modules})
    left, right = _tables(first, names), _tables(second, names)
    return [
        Difference(kind, name, a, b)
        for kind in KINDS
        for name in dict.fromkeys((*left[kind], *right[kind]))
        if (a := left[kind].get(name) or _default(first, second, kind, name))
        != (b := right[kind].get(name) or _default(second, first, kind, name))
    ]


def diff_report(found: Sequence[Difference], first: str, second: str) -> RenderableType:
    """Make a table of the differences; `first` and `second` name the plans."""
    if not found:
        return Text("The plans are equal.")
    names = [f"  {row.name}" for row in found]
    columns = tables.name(""), tables.words("FIRST"), tables.words("SECOND")
    columns[0].width = max(map(len, names))
    room = (tables.WIDTH - columns[0].width) // 2 - 4
    columns[1].width = _width([row.first for row in found], room)
    columns[2].width = _width([row.second for row in found], room)
    table = tables.table(*columns)
    for kind, rows in groupby(found, key=lambda row: row.kind):
        table.add_row(Text(KINDS[kind], style="bold cyan"))
        before = ("", "")
        for row in rows:
            texts = tables.once(row.first, before[0]), tables.once(row.second, before[1])
            table.add_row(f"  {row.name}", *texts)
            before = row.first, row.second
    return Group(Text(f"first   {first}\nsecond  {second}\n"), table)


def _width(texts: Sequence[str], room: int) -> int:
    """The width of a column: at most `room`, unless a name in it is longer."""
    names = (word for text in texts for word in text.split())
    return max(min(room, max(map(len, texts))), *map(len, names))


def _default(plan: Plan, other: Plan, kind: str, name: str) -> str:
    """Describe what it means that a plan does not mention something that `other` mentions."""
    if kind in ("placement", "replicated"):
        known = {pattern(parameter) for parameter in plan.model.parameters}
        if pattern(name) not in known:
            return "absent"
        return "replicated" if kind == "placement" else "not large, or sharded"
    module = name if kind == "collective" else name.rpartition(".")[0]
    inside = f"{module}."
    here, there = (
        any(pattern(parameter).startswith(inside) for parameter in each.model.parameters)
        for each in (plan, other)
    )
    return "absent" if there and not here else "none"


def _tables(plan: Plan, names: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    load = plan.workload.model_dump()
    found["plan"] = {
        "model": plan.model.architecture,
        "config": plan.model.config_hash[:12],
        "mesh": _listed(plan.mesh),
        **{k: _listed(v) if isinstance(v, Mapping) else str(v) for k, v in load.items()},
        "fsdp": ", ".join(plan.fsdp),
    }
    found["cost"] = costs_in_words(plan.predicted)
    found["pin"] = dict(plan.pins)
    found["replicated"] = {pattern(w.parameter): w.reason for w in plan.replicated}
    found["opaque"] = {k: str(v) for k, v in plan.opaque.items()}
    for name in names:
        for kind, key, text in _of_module(plan, name):
            found[kind][key] = text
    return found


def _listed(table: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in table.items())


def _of_module(plan: Plan, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text) of what a plan says about a module.

    If `name` stands for layers that this plan treats differently, all texts say that they differ.
    """
    several = [
        spec for n, spec in plan.modules.items() if name not in plan.modules and pattern(n) == name
    ]
    for spec in several or [plan.module(name) or ModulePlan()]:
        words = collectives_in_words(spec.boundary, plan.coords(0)).replace("\n", ", ")
        for key, entry in sorted(spec.parameters.items()):
            text = UNLIKE if several else placement_in_words(spec.layer, entry)
            yield "placement", f"{name}.{key}".lstrip("."), text
        if words:
            yield "collective", name or "the model", UNLIKE if several else words
        for key, text in sorted((spec.attributes | spec.sizes).items()):
            yield "number", f"{name}.{key}".lstrip("."), UNLIKE if several else text
