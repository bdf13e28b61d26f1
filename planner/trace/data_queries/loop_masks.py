"""Is it known, without data, how many rows a mask may select?"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.planner.graph.axes import leaves_of, refine
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.sizes.expressions import reads_of


def as_long_as_the_model_says(graph: Graph) -> bool:
    """Whether masks of loops (of one dim) are as long as a parameter, or as model code states.

    Not as what it is given, or as data says: then there may be more rows than in the trace.
    """
    marks = graph.marks
    if not marks.masks:
        return True
    axes = refine(graph)

    def atoms(dims: Iterable[tuple[str, int]]) -> set[int]:
        return {a.id for name, dim in dims for a in leaves_of(axes.dims[name][dim])}

    def every(names: Iterable[str]) -> set[int]:
        return atoms((n, dim) for n in names for dim in range(len(axes.dims[n])))

    stated = {(s.tensor, s.dim) for s in graph.sizes if s.dim >= 0 and not reads_of(s.expression)}
    said = every(u.stored for u in graph.uses) | atoms(stated - marks.made_up)
    return atoms((n, 0) for n in marks.masks) <= said - every(graph.inputs) - atoms(marks.made_up)
