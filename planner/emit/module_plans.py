"""What the plan says of each module: its layer, parameters, changes of placement, attributes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import is_split, simplify
from shardwright.planner.contract.names import fold
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Redistribution
from shardwright.planner.contract.styles import LOCAL, STYLES
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.strategies.states import REPLICATED, made_pending


class Differs(Exception):
    """A module would take a tensor in one call as it is, in another as it was around it."""

    def __init__(self, module: str, slot: str) -> None:
        super().__init__(f"'{slot}' is taken otherwise in another call")
        self.module = module


def module_plans(
    root: nn.Module, layouts: Layouts, attributes: Mapping[tuple[str, str], layout.Dim]
) -> dict[str, ModulePlan]:
    """The plan of every module that changes, by its full name.

    Raises:
        Differs: there is no such plan.
    """
    graph, assignment = layouts.graph, layouts.assignment
    parameters: dict[str, dict[str, ParameterPlan]] = {}
    for use in graph.uses:
        stored, used = assignment[use.stored], assignment[use.used]
        if stored == used == REPLICATED:
            continue
        at_rest, seen = (
            layouts.placement(use.stored, stored, True),
            layouts.placement(use.used, used, True),
        )
        owner, _, name = use.fqn.rpartition(".")
        parameters.setdefault(owner, {})[name] = ParameterPlan(
            placement=str(at_rest), use=None if str(seen) == str(at_rest) else str(seen)
        )
    sides: dict[str, dict[str, dict[tuple[str, int], Redistribution]]] = {}
    outer = graph.outer()
    changed = {
        graph.slot(b)[:3] for b in graph.boundaries if assignment[b.source] != assignment[b.target]
    }
    for boundary in graph.boundaries:
        source, target = assignment[boundary.source], assignment[boundary.target]
        slot = graph.slot(boundary)
        if slot[:3] in changed:
            slots = sides.setdefault(boundary.module, {}).setdefault(boundary.side, {})
            around, before = outer.get(boundary.target), None
            if around and made_pending(assignment[around.source], source):
                levels = boundary.module.removeprefix(around.module).count(".") + (
                    not around.module
                )
                before = "." * levels + around.slot
                source = assignment[around.source]
            if slot[2:] in slots and slots[slot[2:]].before != before:
                raise Differs(boundary.module, boundary.slot)
            slots[slot[2:]] = Redistribution(
                slot=boundary.slot,
                source=str(layouts.placement(boundary.source, source)),
                target=str(layouts.placement(boundary.target, target)),
                length=layouts.length(source, target),
                deferred=boundary.target in graph.logits
                and bool(source.shards)
                and layouts.length(source) is None,
                before=before,
            )
    local: dict[str, dict[str, str]] = {}
    for (module, name), dim in attributes.items():
        local.setdefault(module, {})[name] = str(simplify(dim))
    names = {n for n, _ in root.named_modules()} & (parameters.keys() | sides.keys() | local.keys())
    return {
        name: ModulePlan(
            layer=_layer(root.get_submodule(name), parameters.get(name, {})),
            parameters=parameters.get(name, {}),
            inputs=[c for _, c in sorted(sides.get(name, {}).get("in", {}).items())],
            outputs=[c for _, c in sorted(sides.get(name, {}).get("out", {}).items())],
            attributes=local.get(name, {}),
        )
        for name in sorted(names)
    }


def _layer(module: nn.Module, parameters: Mapping[str, ParameterPlan]) -> str:
    """The first style that is for such a module, and for the dim of its weight that is split."""
    if (entry := parameters.get("weight")) is None:
        return LOCAL
    ends = parse(entry.placement).dims, parse(entry.use or entry.placement).dims
    split = {i for i, pair in enumerate(zip(*ends, strict=True)) if all(map(is_split, pair))}
    fits = (s for s in STYLES if s.dim in split and isinstance(module, s.replaced))
    return next((style.layer for style in fits), LOCAL)


def folded(root: nn.Module, plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    """The plans with one entry for modules that differ only in layer numbers."""
    return fold(plans, (n for n, _ in root.named_modules()))


def shapes(root: nn.Module) -> dict[str, list[int]]:
    """Unsharded shape of each parameter, one entry for those that differ only in layer numbers."""
    found = {n: list(p.shape) for n, p in root.named_parameters(remove_duplicate=False)}
    return fold(found, found)
