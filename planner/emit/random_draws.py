"""Placements of the tensors that modules draw random numbers for. Ranks draw for full tensors."""

from __future__ import annotations

from typing import NamedTuple

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
    found: dict[str, _Draws] = {}
    for name, draw in layouts.graph.marks.drawn:
        numbers = _drawn(layouts, name, draw)
        calls = found.setdefault(draw.module, _Draws({}, {}))[not draw.trains]
        calls.setdefault(draw.call, {})[draw.number] = numbers
    every = {module: _of_calls(*calls) for module, calls in found.items()}
    return {m: d for m, d in every.items() if d and any("@" in one.placement for one in d)}


class _Draws(NamedTuple):
    """Call -> number -> what is drawn there, None if that is not known."""

    in_training: dict[int, dict[int, RandomNumbers | None]]
    in_eval: dict[int, dict[int, RandomNumbers | None]]


def _of_calls(
    in_training: dict[int, dict[int, RandomNumbers | None]],
    in_eval: dict[int, dict[int, RandomNumbers | None]],
) -> list[RandomNumbers] | None:
    """Return what each call of a module draws; None if calls differ, or it is not known.

    Calls in training mode may draw more than those in eval mode.
    """
    trained, evaluated = map(_alike, (in_training, in_eval))
    if trained is None or evaluated is None:
        return None
    if not in_training:
        return evaluated
    left = [one for one in evaluated if one.always]
    out: list[RandomNumbers] = []
    for one in trained:
        always = bool(left) and left[0].placement == one.placement
        out.append(left.pop(0) if always else one)
    return None if left else out


def _alike(calls: dict[int, dict[int, RandomNumbers | None]]) -> list[RandomNumbers] | None:
    """Return what all of these calls draw, in order; None if they differ, or it is not known."""
    every = [[call.get(n) for n in range(max(call) + 1)] for call in calls.values()]
    if not every:
        return []
    first = [one for one in every[0] if one is not None]
    known = first == every[0] and all(-1 not in call for call in calls.values())
    return first if known and all(one == first for one in every) else None


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
    return RandomNumbers(placement=str(Placement(dims)), length=length, always=draw.always)
