"""Placements of the tensors that modules draw random numbers for. Ranks draw for full tensors."""

from __future__ import annotations

from shardwright.planner.contract.dims import Atom, atoms, is_split
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import RandomNumbers
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.marks import Draw


def draws_of(layouts: Layouts) -> dict[str, list[RandomNumbers]]:
    """Return module -> its draws in each call, in order, if any of the tensors is sharded.

    Modules whose calls draw for different tensors are left out, and modules that draw for a tensor
    whose full size is not known.
    """
    found: dict[str, dict[int, dict[int, RandomNumbers | None]]] = {}
    for name, draw in layouts.graph.marks.drawn:
        calls = found.setdefault(draw.module, {})
        calls.setdefault(draw.call, {})[draw.number] = _drawn(layouts, name, draw)
    out = {}
    for module, calls in found.items():
        every = [[call.get(n) for n in range(max(call) + 1)] for call in calls.values()]
        first = [one for one in every[0] if one is not None]
        known = first == every[0] and all(-1 not in call for call in calls.values())
        if known and all(one == first for one in every) and any("@" in d.placement for d in first):
            out[module] = first
    return out


def _drawn(layouts: Layouts, name: str, draw: Draw) -> RandomNumbers | None:
    dims = layouts.placement(name).dims
    if draw.weights:
        dims = (*dims[:-1], Atom(None))  # attention weights: each query by each key
    if draw.features:
        dims = (*dims[:2], *(Atom(1) for _ in dims[2:]))
    state, length = layouts.assignment[name], None
    for dim in filter(is_split, dims):
        if any(atom.size is None and atom.mesh for atom in atoms(dim)):
            length = layouts.length(state)
            if length is None or not isinstance(dim, Atom):
                return None
    return RandomNumbers(placement=str(Placement(dims)), length=length)
