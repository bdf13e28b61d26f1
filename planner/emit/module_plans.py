"""Writes the plan of each module: its layer, parameters, redistributions, attributes, interface."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import is_split, simplify
from shardwright.planner.contract.names import fold, grouped
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Dispatch, ModulePlan, ParameterPlan
from shardwright.planner.contract.styles import LOCAL, UNCHANGED, styles
from shardwright.planner.emit.interfaces import (
    Interface,
    enclosing_modules,
    interfaces,
    with_sharded_interface,
)
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.random_draws import draws_of
from shardwright.planner.emit.redistributions import redistributions
from shardwright.planner.experts.probe import Mixture, same_settings
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Graph, Use, taken_by
from shardwright.planner.strategies.state import REPLICATED, State


def module_plans(
    root: nn.Module,
    layouts: Layouts,
    attributes: Mapping[tuple[str, str], layout.Dim],
    sizes: Mapping[tuple[str, str], str],
) -> dict[str, ModulePlan]:
    """Return the plan of each module that changes or has a sharded interface, by its full name.

    Args:
        root: The model.
        layouts: Layouts of its folded graph.
        attributes: (module, attribute) -> local value of the integer.
        sizes: (module, call in its code) -> the dims to give to the call.

    Raises:
        InconsistentBoundary: calls of a module contradict each other.
    """
    parameters, changes = parameter_plans(layouts), redistributions(layouts)
    local: dict[str, dict[str, str]] = {}
    for (module, name), dim in attributes.items():
        local.setdefault(module, {})[name] = str(simplify(dim))
    mixtures: dict[str, Mixture] = layouts.graph.mixtures
    for module, mixture in mixtures.items():
        for path, first in mixture.attributes.items():
            owner, _, name = f"{module}.{path}".rpartition(".")
            held = layout.experts_of_ranks(first, mixture.count, layouts.states.sub.ep)
            local.setdefault(owner, {})[name] = str(held)
    given: dict[str, dict[str, str]] = {}
    for (module, call), text in sizes.items():
        given.setdefault(module, {})[call] = text
    drawn = draws_of(layouts)
    changed = parameters.keys() | {module for module, _ in changes}
    changed |= local.keys() | given.keys() | drawn.keys() | mixtures.keys()
    enclosing = enclosing_modules(changed)  # those with a forward of their own stay as they are
    around = changed | {n for n in enclosing if "forward" not in vars(root.get_submodule(n))}
    changing = {at: {c.slot for c in found} for at, found in changes.items()}
    every = interfaces(layouts, around | with_sharded_interface(layouts), changing)
    nothing = Interface([], [], False, [], [])
    plans = {
        name: ModulePlan(
            layer=_layer(root.get_submodule(name), parameters.get(name, {}))
            if name in around
            else UNCHANGED,
            parameters=parameters.get(name, {}),
            inputs=changes.get((name, "in"), []),
            outputs=changes.get((name, "out"), []),
            attention=changes.get((name, ATTENDS), []),
            keeps=changes.get((name, KEEPS), []),
            attributes=local.get(name, {}),
            sizes=given.get(name, {}),
            draws=drawn.get(name, []),
            dispatch=_dispatch(mixtures.get(name)),
            flags=layouts.graph.flags.get(name, {}) if name in around else {},
            checked=name in around and name in layouts.graph.flags_from_data,
            **every.get(name, nothing)._asdict(),
        )
        for name in sorted({n for n, _ in root.named_modules()} & (changed | every.keys()))
    }
    twins = _twins(root, layouts.graph)
    return {n: plans[twins[n]] if twins.get(n) in plans else plan for n, plan in plans.items()}


def _twins(root: nn.Module, graph: Graph) -> dict[str, str]:
    """Return module that the model does not use -> a module it calls that is just like it.

    They have the same class, the same settings and tied parameters, so one plan is right for both.
    """
    held: dict[str, dict[str, str]] = {}
    for use in graph.uses:
        owner, _, name = use.fqn.rpartition(".")
        held.setdefault(owner, {})[name] = use.stored
    called = {b.module for b in graph.crossed} | {p.slot.module for _, p in graph.passed}
    taken = {*graph.outputs}.union(*map(taken_by, graph.timeline()))
    used = called | {use.fqn.rpartition(".")[0] for use in graph.uses if use.used in taken}
    tied = grouped((frozenset(found.items()), name) for name, found in held.items())
    of = root.get_submodule
    pairs = (
        (name, next((n for n in names if n in called and same_settings(of(n), of(name))), None))
        for names in tied.values()
        for name in names
        if name not in used
    )
    return {name: twin for name, twin in pairs if twin is not None}


def _dispatch(mixture: Mixture | None) -> Dispatch | None:
    """Return what a plan says of the tokens that travel."""
    if mixture is None:
        return None
    names = ("tokens", "experts", "weights", "count", "columns", "counts")
    return Dispatch(**{name: getattr(mixture, name) for name in names}, width=mixture.given)


def parameter_plans(layouts: Layouts) -> dict[str, dict[str, ParameterPlan]]:
    """Return module -> name -> plan, of parameters and buffers that are not just replicated."""
    out: dict[str, dict[str, ParameterPlan]] = {}
    for use in layouts.graph.uses:
        found = parameter_plan(
            layouts, use, layouts.assignment[use.stored], layouts.assignment[use.used]
        )
        if found is not None:
            owner, _, name = use.fqn.rpartition(".")
            out.setdefault(owner, {})[name] = found
    return out


def parameter_plan(layouts: Layouts, use: Use, stored: State, used: State) -> ParameterPlan | None:
    """Return the plan of a parameter for these states; None if it is stored and used replicated.

    `Plan.fsdp` says which parameters copies of the model share out.
    """
    assigned = use.stored in layouts.graph.marks.assigned
    whole = stored.in_copy == used == REPLICATED and use.stored not in layouts.spread
    if whole and not assigned:
        return None
    at_rest = str(layouts.placement(use.stored, stored, True))
    seen = str(layouts.placement(use.used, used, True))
    seen = None if seen == at_rest else seen
    return ParameterPlan(placement=at_rest, use=seen, assigned=assigned)


def _layer(module: nn.Module, parameters: Mapping[str, ParameterPlan]) -> str:
    """Return the first style for this type of module and the sharded dim of its weight."""
    if (entry := parameters.get("weight")) is None:
        return LOCAL
    ends = parse(entry.placement).dims, parse(entry.use or entry.placement).dims
    split = {i for i, pair in enumerate(zip(*ends, strict=True)) if all(map(is_split, pair))}
    fits = (n for n, s in styles() if s.dim in split and isinstance(module, s.replaced))
    return next(fits, LOCAL)


def folded(root: nn.Module, plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    """Return the plans with one entry for modules that differ only in layer numbers."""
    return fold(plans, (n for n, _ in root.named_modules()))


def shapes(root: nn.Module) -> dict[str, list[int]]:
    """Return the unsharded shape of each parameter, folded over layer numbers."""
    found = {n: list(p.shape) for n, p in root.named_parameters(remove_duplicate=False)}
    return fold(found, found)
