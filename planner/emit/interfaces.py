"""The interface of a module: the placements of all its input and output tensors.

A module that is called from outside of the model's forward takes and returns full tensors, and
hooks on it see full tensors. For that the plan also has the placements of tensors that are not
redistributed at the module's boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.planner.contract.names import pattern, prefixes, slot_pattern
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import Placed
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.unused_gradients import UNKNOWN, UnusedGradients
from shardwright.planner.graph.graph import Slot
from shardwright.planner.strategies.state import REPLICATED

SIDES = ("in", "out")
"""The sides of a module's boundary that hooks see: not attention inputs, not attributes."""


class Interface(NamedTuple):
    """Placements of a module's tensors that are not redistributed.

    Attributes:
        takes: Placements of inputs.
        gives: Placements of outputs.
        varies: Whether the placements in some call differ from these.
        no_gradient: Sides and slots of tensors without a gradient.
        unknown: Sides and slots of tensors that nothing in the model uses, with unknown placement.
    """

    takes: list[Placed]
    gives: list[Placed]
    varies: bool
    no_gradient: list[str]
    unknown: list[str]


Call = dict[Slot, str]
"""A call of a module: the tensor in each slot, as the module's own code sees it."""

Changing = Mapping[tuple[str, str], Collection[str]]
"""(module, side) -> the slots that are redistributed there; the plan lists these separately."""


def interfaces(
    layouts: Layouts, modules: Collection[str], changing: Changing
) -> dict[str, Interface]:
    """Return the interface of each of these modules that was called."""
    unknown, unused = _unknown(layouts), UnusedGradients(layouts)
    return {
        m: _interface(m, calls, unused, changing, sorted(unknown.get(m, ())))
        for m, calls in _calls(layouts, modules).items()
    }


def _interface(
    module: str,
    calls: Sequence[Call],
    unused: UnusedGradients,
    changing: Changing,
    unknown: list[str],
) -> Interface:
    first, alike = _first(_placements(calls, unused))
    takes, gives = (_side(first, s, changing.get((module, s), ())) for s in ("in", "out"))
    constant = _no_gradient(module, calls, unused, changing)
    return Interface(takes, gives, not alike, constant, unknown)


def with_sharded_interface(layouts: Layouts) -> set[str]:
    """Return modules with inputs or outputs that are not replicated, or unknown, inside them."""
    crossing = ((slot, name) for slot, name in _crossing(layouts) if slot.side in SIDES)
    found = {slot.module for slot, name in crossing if layouts.assignment[name] != REPLICATED}
    return found | _unknown(layouts).keys()


def enclosing_modules(changed: Iterable[str]) -> set[str]:
    """Return the modules around `changed` outside of blocks, without the root: users call these."""
    around = {name for module in changed for name in prefixes(module)[1:-1]}
    return {name for name in around if pattern(name) == name}


def _crossing(layouts: Layouts) -> Iterator[tuple[Slot, str]]:
    """Yield (slot, tensor) of all module inputs and outputs, in order.

    The tensor is the one that the module's own code sees. Integers and complex numbers that are
    replicated in all calls are left out.
    """
    graph = layouts.graph
    passed = [(at, p.slot, p.name) for at, p in graph.passed if p.name is not None]
    parts = {slot for _, slot, name in passed if layouts.assignment[name] != REPLICATED}
    waiting = deque((at, slot, name) for at, slot, name in passed if slot in parts)
    for number, boundary in enumerate(graph.crossed):
        while waiting and waiting[0][0] <= number:
            yield waiting.popleft()[1:]
        inner = boundary.target if boundary.side == "in" else boundary.source
        yield graph.slot(boundary), inner
    yield from (each[1:] for each in waiting)


def _unknown(layouts: Layouts) -> dict[str, set[str]]:
    """Return module -> sides and slots of unused tensors made from sharded or Partial tensors."""
    found: dict[str, set[str]] = {}
    for _, passing in layouts.graph.passed:
        states = map(layouts.assignment.__getitem__, passing.made_of)
        if passing.name is None and any(s.shards or s.partial for s in states):
            slot = passing.slot
            found.setdefault(slot.module, set()).add(f"{slot.side} {slot.slot}".rstrip())
    return found


def _calls(layouts: Layouts, modules: Collection[str]) -> dict[str, list[Call]]:
    """Return every call of each of these modules, in order."""
    found: dict[str, list[Call]] = {}
    for slot, name in _crossing(layouts):
        if slot.module not in modules or slot.side not in SIDES:
            continue
        calls = found.setdefault(slot.module, [{}])
        known = calls[-1]
        if slot in known or (slot.side == "in" and any(s.side == "out" for s in known)):
            calls.append({})
        calls[-1][slot] = name
    return found


def _first(calls: Iterable[Mapping[Slot, Placement]]) -> tuple[dict[Slot, Placement], bool]:
    """Return the placements of the calls that agree with the first, and whether all calls agree."""
    known: dict[Slot, Placement] = {}
    alike = True
    for placements in calls:
        if all(known.get(s, p).of_any_size() == p.of_any_size() for s, p in placements.items()):
            known = {**placements, **known}
        else:
            alike = False
    return known, alike


def _placements(calls: Sequence[Call], unused: UnusedGradients) -> list[dict[Slot, Placement]]:
    """Return the placements in each call.

    An input without a gradient gets its placement from another call, if the values of inputs and
    all outputs have the same placements there: the same code would treat a gradient in the same
    way.
    """
    known = [call.items() for call in calls]
    placements = [{s: unused.placement(name) for s, name in each} for each in known]
    without = [{s for s, name in each if unused.mask(name) is None} for each in known]
    out = []
    for placed, constant in zip(placements, without, strict=True):
        entering = [s for s in constant if s.side == "in"]
        found = (
            {**placed, **{s: other[s] for s in entering}}
            for other, same in zip(placements, without, strict=True)
            if other.keys() == placed.keys() and not same.issuperset(entering)
            if all(_same(p, other[s], s in entering) for s, p in placed.items())
        )
        out.append(next(found, placed))
    return out


def _same(one: Placement, other: Placement, values: bool) -> bool:
    """Whether two placements are equal; with `values`, without regard to their gradients."""
    if values:
        one, other = (Placement(p.dims, p.partial) for p in (one, other))
    return one.of_any_size() == other.of_any_size()


def _no_gradient(
    module: str, calls: Iterable[Call], unused: UnusedGradients, changing: Changing
) -> list[str]:
    """Return the sides and slots of tensors whose gradient is unknown in all calls.

    Tensors that are sharded over all sub-axes are left out: their gradient is sharded like them.
    """
    found: dict[tuple[str, str], bool] = {}
    for call in calls:
        for slot, name in call.items():
            at = slot.side, slot.slot
            changes = slot.slot in changing.get((module, slot.side), ())
            found[at] = found.get(at, True) and _constant(name, unused, changes)
    rest = {(side, slot_pattern(slot)) for (side, slot), constant in found.items() if not constant}
    folded = (
        (side, slot if (side, slot_pattern(slot)) in rest else slot_pattern(slot))
        for (side, slot), constant in found.items()
        if constant
    )
    return sorted({f"{side} {slot}".rstrip() for side, slot in folded})


def _constant(name: str, unused: UnusedGradients, changes: bool) -> bool:
    """Whether nothing is known of the gradient that a tensor would have."""
    layouts = unused.layouts
    tensor, states = layouts.graph.tensors[name], layouts.states
    if tensor.differentiable or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return False
    if (mask := unused.mask(name)) == 0 or (mask not in (None, UNKNOWN) and not changes):
        return False
    covered = states.covered(name, layouts.assignment[name].shards)
    return any(not covered & bit for bit in states.sub.bits)


def _side(placed: Mapping[Slot, Placement], side: str, changing: Collection[str]) -> list[Placed]:
    """Return the placements of one side. Slots that differ only in numbers may share an entry."""
    groups: dict[tuple[str, int], dict[str, str]] = {}
    for (_, where, slot, ndim), placement in placed.items():
        if where == side:
            groups.setdefault((slot_pattern(slot), ndim), {})[slot] = str(placement)
    found = set()
    for (folded, _), texts in groups.items():
        alike = len({*texts.values()}) == 1 and not any(slot in changing for slot in texts)
        as_it_is = ((slot, text) for slot, text in texts.items() if slot not in changing)
        found |= {(folded if alike else slot, text) for slot, text in as_it_is}
    return [Placed(slot=slot, placement=text) for slot, text in sorted(found)]
