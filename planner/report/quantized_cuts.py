"""Says how a quantized parameter is held, and whether ranks' parts begin and end on its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.planner.contract.dims import Concat, Dim, dim_size, local_ranges
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import lookup
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan


def stored_in_words(plan: Plan, name: str) -> str | None:
    """Return how the parameter `name` is held; None if it is dense."""
    quantized = plan.workload.quantized
    bits = lookup(quantized.bits, name) if quantized else None
    if quantized is None or bits is None:
        return None
    blocks = lookup(quantized.blocks, name) or [0, 0]
    sizes = " x ".join(str(n or "all") for n in blocks)
    text = f"as {quantized.method} stores it, {bits:.3g} bits an element, a scale for {sizes}"
    if (entry := plan.parameter(name)) is None:
        return text
    ranks = [plan.coords(rank) for rank in range(plan.world_size)]
    dims = parse(entry.placement).dims[-2:]
    cuts = [(at, n) for dim, n in zip(dims, blocks, strict=True) for at in _cuts(dim, ranks)]
    if not cuts:
        return text
    inside = sum(at % n != 0 if n else True for at, n in cuts)
    if not inside:
        return f"{text}; all cuts fall between blocks"
    which = "the cut falls" if len(cuts) == 1 else f"{inside} of {len(cuts)} cuts fall"
    return f"{text}; {which} inside a block, whose scale both ranks hold"


def _cuts(dim: Dim, ranks: list[Coords]) -> Iterator[int]:
    """Yield where parts of `dim` begin or end, but not its own ends; from the start of its term."""
    for term in dim.terms if isinstance(dim, Concat) else (dim,):
        ends = {end for at in ranks for held in local_ranges(term, at) for end in held}
        yield from sorted(ends - {0, dim_size(term)})
