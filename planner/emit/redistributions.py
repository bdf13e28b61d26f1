"""Writes the redistributions at the boundaries of modules."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.contract.plan_file import Redistribution
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import ATTENDS, Boundary, crossed
from shardwright.planner.strategies.state import State, made_partial


class InconsistentBoundary(Exception):
    """Calls of a module disagree on whether a slot starts from the tensor of an outer module."""

    def __init__(self, module: str, slot: str) -> None:
        super().__init__(f"'{slot}' is taken otherwise in another call")
        self.module = module


def redistributions(layouts: Layouts) -> dict[tuple[str, str], list[Redistribution]]:
    """Return (module, side) -> its redistributions, in the order of slots.

    If a tensor changes at a slot in one call, the plan lists all tensors of that slot. The inputs
    of attention are always listed if the graph has that side.

    Raises:
        InconsistentBoundary: calls of a module contradict each other.
    """
    graph, assignment = layouts.graph, layouts.assignment
    outer = graph.outer()
    changed = {
        graph.slot(b)[:3] for b in graph.boundaries if assignment[b.source] != assignment[b.target]
    }
    sides: dict[tuple[str, str], dict[tuple[str, int], Redistribution]] = {}
    for boundary in graph.boundaries:
        slot = graph.slot(boundary)
        if slot[:3] in changed or boundary.side == ATTENDS:
            around = outer.get(boundary.target)
            ends = [assignment[n] for n in crossed(boundary, around)]
            found = redistribution(layouts, boundary, around, ends)
            slots = sides.setdefault((boundary.module, boundary.side), {})
            if slot[2:] in slots and slots[slot[2:]].before != found.before:
                raise InconsistentBoundary(boundary.module, boundary.slot)
            slots[slot[2:]] = found
    return {side: [c for _, c in sorted(slots.items())] for side, slots in sides.items()}


def redistribution(
    layouts: Layouts, boundary: Boundary, around: Boundary | None, ends: Sequence[State]
) -> Redistribution:
    """Return the redistribution at a boundary whose tensors have these states.

    Args:
        layouts: Layouts of the graph.
        boundary: The boundary.
        around: The boundary of an enclosing module by which the tensor came in, if any.
        ends: The states of the tensors of `crossed`.
    """
    source, target = ends[-2:]
    before = None
    if around and made_partial(ends[0], source):
        before, source = _path(boundary, around), ends[0]
    placed = layouts.along if boundary.side == ATTENDS else layouts.placement
    by_axes = bool(source.shards) and layouts.length(source) is None  # not along the sequence
    return Redistribution(
        slot=boundary.slot,
        source=str(placed(boundary.source, source)),
        target=str(placed(boundary.target, target)),
        length=layouts.length(source, target),
        deferred=boundary.target in layouts.graph.marks.logits and by_axes,
        before=before,
    )


def _path(boundary: Boundary, around: Boundary) -> str:
    """Return the slot of an enclosing module as seen from `boundary`: a dot for each level."""
    levels = boundary.module.removeprefix(around.module).count(".") + (not around.module)
    return "." * levels + around.slot
