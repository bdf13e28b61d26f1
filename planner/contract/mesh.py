"""The mesh that a plan is for: `tp` splits weights, `cp` sequences, other dims share the batch.

A mesh dim may be a product of sub-axes, `tp.0` the major one; `tp` means all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod

from shardwright.errors import PlanError, UsageError

TP = "tp"
CP = "cp"

BATCH = ("dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "data", "replica")
"""Names of mesh dims whose ranks share the batch: each holds a copy of the model."""

MOST_RANKS = 1 << 16
"""Ranks of a mesh: there are no more devices on one network that a model is split over."""
MOST_SUB_AXES = 6
"""Of one mesh dim: each set of them has a name, and maybe a process group."""

Coords = Mapping[str, tuple[int, int]]
"""Where a rank stands: mesh dim name -> (index on it, its size)."""


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=4` as a mesh.

    Raises:
        UsageError: it is not written so, or names a dim twice.
    """
    out: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not re.fullmatch("[0-9]{1,18}", size):
            raise UsageError(f"'{text}' is not a mesh: write names and ranks, like dp=2,tp=4")
        if name in out:
            raise UsageError(f"mesh dim '{name}' is named twice in '{text}'")
        out[name] = int(size)
    return read_mesh(None, out)


def read_mesh(tp: int | None, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """The mesh that is asked for by a number of ranks, or by dims; one of these must be given.

    Raises:
        UsageError: both are given or none; a dim is missing, has another name than those that mean
            something, or has no rank.
    """
    if (tp is None) == (mesh is None):
        raise UsageError("give either tp, the ranks to split over, or mesh, like dp=2,tp=4")
    out = {TP: tp} if mesh is None else dict(mesh)
    sizes = {name: size for name, size in out.items() if size is not None}
    for name, size in sizes.items():
        if (fault := fault_of_dim(name, size)) is not None:
            raise UsageError(fault)
    if prod(sizes.values()) > MOST_RANKS:
        raise UsageError(f"{prod(sizes.values()):,} ranks: {MOST_RANKS:,} are the most")
    if TP not in sizes:
        raise UsageError(f"the mesh {dict(sizes)} has no dim 'tp': its ranks split the weights")
    for name in sorted(sizes.keys() - {TP, CP, *BATCH}):
        raise UsageError(
            f"mesh dim '{name}' means nothing here: 'tp' splits weights, 'cp' sequences, and "
            f"copies of the model share the batch over {', '.join(BATCH)}"
        )
    return dict(sorted(sizes.items()))  # as a plan file has them


def fault_of_dim(name: str, size: int) -> str | None:
    """What is wrong with a mesh dim of that name and size; None if nothing is."""
    if size < 1:
        return f"{name} must be at least 1, not {size}"
    if size > MOST_RANKS:
        return f"{name}={size} is too large: {MOST_RANKS:,} ranks are the most"
    if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
        return f"'{name:.80}' is no name for a mesh dim: letters, digits and _"
    return None


def fault_of_sub_axes(sizes: Sequence[int], ranks: int) -> str | None:
    """What is wrong with sub-axes of these sizes for a mesh dim of so many ranks."""
    if not 2 <= len(sizes) <= MOST_SUB_AXES:
        return f"{len(sizes)} sub-axes: a mesh dim has none, or 2 to {MOST_SUB_AXES}"
    if min(sizes) < 2 or prod(sizes) != ranks:
        return f"sub-axes of {list(sizes)} do not make a mesh dim of {ranks} ranks"
    return None


def batch_dims(mesh: Mapping[str, int]) -> list[str]:
    """The mesh dims whose ranks take different sequences of the batch: all but tp and cp."""
    return [name for name in mesh if name not in (TP, CP)]


def replicas(mesh: Mapping[str, int]) -> int:
    """Copies of the model that share the batch."""
    return prod(mesh[name] for name in batch_dims(mesh))


def sub_name(mesh: str, numbers: Iterable[int | str]) -> str:
    """The name of some sub-axes of mesh dim `mesh`: `tp.0`, or `tp.01` for two of three."""
    return f"{mesh}." + "".join(map(str, numbers))


def with_sub_axes(coords: Coords, sub_axes: Mapping[str, Sequence[int]]) -> Coords:
    """`coords` with those on sub-axes, alone and some together.

    Args:
        coords: Where a rank stands on each mesh dim.
        sub_axes: Mesh dim -> the sizes of its sub-axes, major first.
    """
    out = dict(coords)
    for mesh, sizes in sub_axes.items():
        at, ranks = coords[mesh]
        if (fault := fault_of_sub_axes(sizes, ranks)) is not None:
            raise PlanError(fault)
        places: list[int] = []
        for size in reversed(sizes):
            at, place = divmod(at, size)
            places.insert(0, place)
        for n in range(1, len(sizes)):
            for some in combinations(range(len(sizes)), n):
                index, size = 0, 1
                for i in some:
                    index, size = index * sizes[i] + places[i], size * sizes[i]
                out[sub_name(mesh, some)] = (index, size)
    return out


def coords_of(mesh: Mapping[str, int], sub_axes: Mapping[str, Sequence[int]], rank: int) -> Coords:
    """Where a rank stands on each mesh dim and sub-axis; the last mesh dim varies fastest.

    Args:
        mesh: Mesh dim -> its ranks.
        sub_axes: Mesh dim -> the sizes of its sub-axes, major first.
        rank: A number below the product of the mesh.
    """
    out: dict[str, tuple[int, int]] = {}
    for name, size in reversed(list(mesh.items())):
        rank, out[name] = rank // size, (rank % size, size)
    return with_sub_axes(out, sub_axes)


def mesh_dim_of(name: str) -> str:
    """The mesh dim that `name` means or is a part of: `tp` for `tp.0`."""
    return name.partition(".")[0]


def sub_axes_of(name: str, coords: Coords) -> set[str]:
    """The single sub-axes that `name` stands for; a mesh dim without any stands for itself."""
    dim, _, digits = name.partition(".")
    if digits:
        return {sub_name(dim, [digit]) for digit in digits}
    return {n for n in coords if n.startswith(f"{dim}.") and len(n) == len(dim) + 2} or {name}


def together(bits: Sequence[str], coords: Coords) -> str:
    """The name of these single sub-axes of one mesh dim."""
    dim = mesh_dim_of(bits[0])
    if set(bits) == sub_axes_of(dim, coords):
        return dim
    return sub_name(dim, [bit.rpartition(".")[2] for bit in sorted(bits)])
