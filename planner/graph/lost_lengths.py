"""Keep the tensors whole of code that gets a length as a plain number.

Where code compares a length, a call for which that comes out otherwise is refused
(`emit/compared_lengths.py`). Code may also compute `float(n)` or `len(x)`, and compare that unseen.
What it then does for another length is right on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.planner.graph.axes import Axes, Dim, atoms_of
from shardwright.planner.graph.graph import Graph


def varying(graph: Graph, axes: Axes) -> Callable[[Dim], bool]:
    """Return a function that says whether a length is not one of the parameters'.

    Where code cuts a table by a length (`table[:n]`), the length is a part of the table's dim, and
    varies nevertheless.
    """
    cuts = _cuts(graph, axes)
    own: set[int] = set()
    for use in graph.uses:
        for dim in axes.dims[use.stored]:
            atoms = _ids(dim)
            if not any(length < atoms and atoms & rest for length, rest in cuts):
                own |= atoms

    def varies(dim: Dim) -> bool:
        return dim.size == 1 or not _ids(dim) <= own

    return varies


def _cuts(graph: Graph, axes: Axes) -> set[tuple[frozenset[int], frozenset[int]]]:
    """Return for each cut by a length the atoms of the length, and those of all other parts."""
    by = graph.producers() if graph.marks.cut_by else {}
    cut_by = [(by[name], t, at) for name, t, at in graph.marks.cut_by if name in by]
    lengths = [(op, _ids(axes.dims[t][at])) for op, t, at in cut_by]
    parts = {op.name: frozenset().union(*map(_ids, axes.parts(op))) for op, _ in lengths}
    return {(length, parts[op.name] - length) for op, length in lengths}


def _ids(dim: Dim) -> frozenset[int]:
    return frozenset(atom.id for atom in atoms_of(dim))


def keep_beside_lost(graph: Graph, axes: Axes) -> None:
    """Mark the tensors of such code, if the length is not one of the parameters'.

    The parts that ops cut by such a length (`table[:n]`) have other sizes in other calls, and are
    never sharded.
    """
    varies = varying(graph, axes)
    graph.marks.decided_unseen |= {
        tensor for tensor, other, at in graph.marks.beside_lost if varies(axes.dims[other][at])
    }
    cut = {name for name, other, at in graph.marks.cut_by if varies(axes.dims[other][at])}
    for op in graph.ops if cut else ():
        if not cut.isdisjoint(op.outputs):
            for part in axes.parts(op):
                for atom in atoms_of(part):
                    atom.unshardable = True
