"""What changes its placement on the way into modules and out of them."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.contract.plan_file import Redistribution
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import ATTENDS, Boundary
from shardwright.planner.strategies.state import State, made_partial


class InconsistentBoundary(Exception):
    """A module would take a tensor in one call as it is, in another as it was around it."""

    def __init__(self, module: str, slot: str) -> None:
        super().__init__(f"'{slot}' is taken otherwise in another call")
        self.module = module


def redistributions(layouts: Layouts) -> dict[tuple[str, str], list[Redistribution]]:
    """(module, "in" or "out") -> what happens there, in the order of arguments and outputs.

    Where a tensor changes at a slot in one call, what comes there in others is named as well; what
    goes into attention always, as there the side is.

    Raises:
        InconsistentBoundary: there is no such plan.
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


def crossed(boundary: Boundary, around: Boundary | None) -> tuple[str, ...]:
    """The tensors that the states of say what happens at a boundary: for `redistribution`."""
    return (*([around.source] if around else []), boundary.source, boundary.target)


def redistribution(
    layouts: Layouts, boundary: Boundary, around: Boundary | None, ends: Sequence[State]
) -> Redistribution:
    """What happens at a boundary whose tensors are in these states.

    Args:
        layouts: Of the graph.
        boundary: Where.
        around: That at which its tensor came in, further out.
        ends: The states of the tensors that `crossed` names.
    """
    source, target = ends[-2:]
    before = None
    if around and made_partial(ends[0], source):
        before, source = _path(boundary, around), ends[0]
    placed = layouts.along if boundary.side == ATTENDS else layouts.placement
    return Redistribution(
        slot=boundary.slot,
        source=str(placed(boundary.source, source)),
        target=str(placed(boundary.target, target)),
        length=layouts.length(source, target),
        deferred=boundary.target in layouts.graph.marks.logits and _split_by_axes(layouts, source),
        before=before,
    )


def _path(boundary: Boundary, around: Boundary) -> str:
    """The slot of a module around, as seen from one within: a dot for each level."""
    levels = boundary.module.removeprefix(around.module).count(".") + (not around.module)
    return "." * levels + around.slot


def _split_by_axes(layouts: Layouts, state: State) -> bool:
    """Whether a tensor is split, and not along the sequence."""
    return bool(state.shards) and layouts.length(state) is None
