"""Sizes that a call in a module's own code is given, and that no attribute makes local.

`y.view(B, T, C)` with `C` read off a whole tensor: the code computes the whole size, and the plan
has the call take the local one in its place. Attributes that such a size is computed from stay as
they are, so that what the code computes is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import Atom, Dim, simplify
from shardwright.planner.graph.graph import Graph, SizeArgument
from shardwright.planner.trace.sizes.expressions import evaluate
from shardwright.runtime.code.call_sites import name_of

GivenSizes = dict[tuple[str, str], str]
"""(module, name of a call) -> the dims that it is to be given; `?` stays as it is."""

Reads = Mapping[tuple[int, int], int]


def can_be_given(size: SizeArgument, target: Dim, reads: Sequence[Reads]) -> bool:
    """Whether a call can be given `target` for a size: its code computes the whole one everywhere.

    Args:
        size: The size.
        target: The dim that it should be.
        reads: Local sizes that code reads off tensors, on each rank.
    """
    whole = layout.dim_size(target)
    known = all(evaluate(size.expression, {}, read) == whole for read in reads)
    return known and not size.bound and size.caller is not None and _name(size) is not None


def given_sizes(
    graph: Graph, sizes: Sequence[SizeArgument], dim_of: Callable[[str, int], Dim]
) -> tuple[GivenSizes, list[SizeArgument]]:
    """What calls are to be given, and those of `sizes` that they cannot be.

    A call does the same each time that it is made.

    Args:
        graph: The traced model.
        sizes: What is to be given.
        dim_of: A dim of a tensor as a plan has it, with sizes that vary at run time left open.
    """
    wanted = {id(size): str(simplify(dim_of(size.tensor, size.dim))) for size in sizes}
    texts: dict[tuple[object, int], set[str]] = {}
    for size in graph.sizes:
        if size.caller is not None and not size.bound:
            texts.setdefault((size.caller, size.place), set()).add(wanted.get(id(size), "?"))
    calls: dict[tuple[str, str], dict[int, str]] = {}
    for size in sizes:
        if len(texts[size.caller, size.place]) == 1:
            name = _name(size)
            assert name is not None, "it can be given"
            calls.setdefault((size.caller.module, name), {})[size.place] = wanted[id(size)]
    given = {
        key: ", ".join(dims.get(place, str(Atom(None))) for place in range(max(dims) + 1))
        for key, dims in calls.items()
    }
    return given, [size for size in sizes if len(texts[size.caller, size.place]) > 1]


def _name(size: SizeArgument) -> str | None:
    _, method, code, at = size.caller
    return name_of(method, code, at)
