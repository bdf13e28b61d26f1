"""How tensors lie where they enter and leave a module: what it needs to be called by itself.

A module that is called from outside of the model's forward takes whole tensors and gives whole
ones, and so do hooks on it. So the plan says how those lie that do not change at its boundary, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwright.planner.contract.names import pattern, slot_pattern
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import Placed
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import ATTENDS, Boundary, Graph, Slot
from shardwright.planner.strategies.state import REPLICATED, State


class Interface(NamedTuple):
    """What a module takes and gives as it is, and whether it does otherwise in some calls.

    And the sides and slots of what has no gradient.
    """

    takes: list[Placed]
    gives: list[Placed]
    varies: bool
    no_gradient: list[str]


Call = dict[Slot, str]
"""A call of a module: the tensor in each of its slots, as the module's own code has it."""


def interfaces(layouts: Layouts, modules: Collection[str]) -> dict[str, Interface]:
    """The interface of each of these modules that was called."""
    found = {m: _interface(calls, layouts) for m, calls in _calls(layouts.graph, modules).items()}
    return found | {m: found[twin] for m, twin in _twins(layouts, found) if m in modules}


def _interface(calls: Sequence[Call], layouts: Layouts) -> Interface:
    placed, varies = _states(calls, layouts)
    unknown = _no_gradient(calls, layouts)
    return Interface(_side(placed, "in"), _side(placed, "out"), varies, unknown)


def between(layouts: Layouts) -> set[str]:
    """The modules that take or give, as it is, something that is not Replicate."""
    return {
        b.module
        for b in layouts.graph.crossed
        if b.side != ATTENDS and layouts.assignment[_inner(b)] != REPLICATED
    }


def gates(changed: Iterable[str]) -> set[str]:
    """The modules around those that change, in no block and not the root: users call such alone."""
    around = {
        ".".join(parts[:n])
        for name in changed
        for parts in [name.split(".")]
        for n in range(1, len(parts))
    }
    return {name for name in around if pattern(name) == name}


def _twins(layouts: Layouts, called: Collection[str]) -> list[tuple[str, str]]:
    """Modules that were not called, each with one that was and has the very same parameters."""
    held: dict[str, dict[str, str]] = {}
    for use in layouts.graph.uses:
        module, _, name = use.fqn.rpartition(".")
        held.setdefault(module, {})[name] = use.stored
    twins = {(*found.items(),): m for m, found in reversed(held.items()) if m in called}
    return [
        (m, twins[key])
        for m, found in held.items()
        if m not in called and (key := (*found.items(),)) in twins
    ]


def _calls(graph: Graph, modules: Collection[str]) -> dict[str, list[Call]]:
    """Every call of each of these modules, in order."""
    found: dict[str, list[Call]] = {}
    for b in graph.crossed:
        if b.module not in modules or b.side == ATTENDS:
            continue
        calls, slot = found.setdefault(b.module, [{}]), graph.slot(b)
        if slot in calls[-1] or (b.side == "in" and any(s.side == "out" for s in calls[-1])):
            calls.append({})
        calls[-1][slot] = _inner(b)
    return found


def _inner(boundary: Boundary) -> str:
    return boundary.target if boundary.side == "in" else boundary.source


def _states(calls: Iterable[Call], layouts: Layouts) -> tuple[dict[Slot, str], bool]:
    """How tensors lie in the first call, and in those that are like it where they have the same.

    A tensor that is only in another is left out: nothing is known of it beside those. And whether
    there is another.
    """
    states: dict[Slot, State] = {}
    known: dict[Slot, Placement] = {}
    varies = False
    for call in calls:
        now = {slot: layouts.assignment[name] for slot, name in call.items()}
        if all(states.get(slot, state) == state for slot, state in now.items()):
            states = now | states
            known = {slot: layouts.placement(name) for slot, name in call.items()} | known
            continue
        lies = {slot: layouts.placement(name).of_any_size() for slot, name in call.items()}
        varies |= not all(s in known and known[s].of_any_size() == p for s, p in lies.items())
    return {slot: str(placement) for slot, placement in known.items()}, varies


def _no_gradient(calls: Iterable[Call], layouts: Layouts) -> list[str]:
    """Sides and slots of real tensors that have a gradient in no call.

    Without those of which ranks have parts: theirs would be the parts of the gradient.
    """
    found: dict[tuple[str, str], bool] = {}
    for call in calls:
        for slot, name in call.items():
            at = slot.side, slot.slot
            found[at] = found.get(at, True) and _constant(name, layouts)
    rest = {(side, slot_pattern(slot)) for (side, slot), constant in found.items() if not constant}
    folded = (
        (side, slot if (side, slot_pattern(slot)) in rest else slot_pattern(slot))
        for (side, slot), constant in found.items()
        if constant
    )
    return sorted({f"{side} {slot}".rstrip() for side, slot in folded})


def _constant(name: str, layouts: Layouts) -> bool:
    """Whether a tensor would have a gradient of which nothing is known."""
    tensor, states = layouts.graph.tensors[name], layouts.states
    if tensor.differentiable or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return False
    covered = states.covered(name, layouts.assignment[name].shards)
    return any(not covered & bit for bit in states.sub.bits)


def _side(placed: Mapping[Slot, str], side: str) -> list[Placed]:
    """Of one side, with one entry for slots that differ in numbers within and are alike."""
    groups: dict[tuple[str, int], dict[str, str]] = {}
    for (_, where, slot, ndim), text in placed.items():
        if where == side:
            groups.setdefault((slot_pattern(slot), ndim), {})[slot] = text
    found = set()
    for (folded, _), texts in groups.items():
        alike = len({*texts.values()}) == 1
        found |= {(folded if alike else slot, text) for slot, text in texts.items()}
    return [Placed(slot=slot, placement=text) for slot, text in sorted(found)]
