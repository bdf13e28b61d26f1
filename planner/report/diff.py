"""How two plans differ, in the words of the report: what is split how, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import collectives_in_words, placement_in_words

ABSENT = {"placement": "replicated", "replicated": "not large, or sharded"}
"""What a plan means that does not name something, by kind of difference."""

UNLIKE = "differs by layer"


class Difference(NamedTuple):
    """One thing that two plans say differently; `kind` is a word for what it is."""

    kind: str
    name: str
    first: str
    second: str


def differences(first: Plan, second: Plan) -> list[Difference]:
    """All of them; who found a plan, and with which versions, is no part of it."""
    names = _names(first, second)
    left, right = _tables(first, names), _tables(second, names)
    return [
        Difference(kind, name, a, b)
        for kind in left
        for name in dict.fromkeys((*left[kind], *right[kind]))
        if (a := left[kind].get(name, ABSENT.get(kind, "none")))
        != (b := right[kind].get(name, ABSENT.get(kind, "none")))
    ]


def _tables(plan: Plan, names: list[str]) -> dict[str, dict[str, str]]:
    return {
        "plan": _head(plan),
        "cost": costs(plan),
        "pin": plan.pins,
        "placement": {k: v for n in names for k, v in _placements(plan, n)},
        "collective": {k: v for n in names for k, v in _boundaries(plan, n)},
        "number": {k: v for n in names for k, v in _numbers(plan, n)},
        "replicated": {pattern(w.parameter): w.reason for w in plan.replicated},
        "opaque": {k: str(v) for k, v in plan.opaque.items()},
    }


def _head(plan: Plan) -> dict[str, str]:
    load = plan.workload.model_dump()
    return {
        "model": plan.model.architecture,
        "config": plan.model.config_hash[:12],
        "mesh": _listed(plan.mesh),
        **{k: _listed(v) if isinstance(v, Mapping) else str(v) for k, v in load.items()},
    }


def _listed(table: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in table.items())


def costs(plan: Plan) -> dict[str, str]:
    """What a plan should cost, a row each."""
    predicted = plan.predicted
    held = max(predicted.parameter_bytes)
    out = {"memory a rank": human_bytes(held), "predicted time": human_time(predicted.time_ns)}
    for c in predicted.collectives:
        out[f"{c.phase} {c.kind.replace('_', '-')}"] = f"{c.count} ({human_bytes(c.bytes)})"
    return out


def _names(first: Plan, second: Plan) -> list[str]:
    return sorted({*first.modules, *second.modules})


def _unlike(plan: Plan, name: str) -> list[ModulePlan]:
    """Where `name` stands for layers that are not alike in this plan: those that it names."""
    if name in plan.modules:
        return []
    return [spec for other, spec in plan.modules.items() if pattern(other) == name]


def _placements(plan: Plan, name: str) -> Iterator[tuple[str, str]]:
    spec = plan.module(name) or ModulePlan()
    for key, entry in sorted(spec.parameters.items()):
        yield f"{name}.{key}".lstrip("."), placement_in_words(spec.layer, entry)
    for key in sorted({key for spec in _unlike(plan, name) for key in spec.parameters}):
        yield f"{name}.{key}", UNLIKE


def _boundaries(plan: Plan, name: str) -> Iterable[tuple[str, str]]:
    spec = plan.module(name) or ModulePlan()
    words = collectives_in_words(spec.boundary, plan.coords(0)).replace("\n", ", ")
    if any(spec.boundary for spec in _unlike(plan, name)):
        words = UNLIKE
    return [(name or "the model", words)] if words else []


def _numbers(plan: Plan, name: str) -> Iterator[tuple[str, str]]:
    spec = plan.module(name) or ModulePlan()
    for key, text in sorted((spec.attributes | spec.sizes).items()):
        yield f"{name}.{key}".lstrip("."), text
    unlike = _unlike(plan, name)
    for key in sorted({key for spec in unlike for key in spec.attributes | spec.sizes}):
        yield f"{name}.{key}", UNLIKE
