"""The mesh of a plan: `tp` splits weights, `cp` splits sequences, other dims share the batch.

The ranks of `ep` share the batch, too, and each holds some of the experts of a mixture.

A mesh dim may be a product of sub-axes, `tp.0` being the major one; `tp` means all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod

from shardwright.errors import PlanError, UsageError

TP = "tp"
CP = "cp"
EP = "ep"

BATCH = ("dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "data", "replica")
"""Names of mesh dims whose ranks share the batch; each rank along them holds a model copy."""

MAX_RANKS = 1 << 16
"""Most ranks of a mesh: no network has more devices that one model is split over."""
MAX_SUB_AXES = 6
"""Most sub-axes of a mesh dim: each set of them has a name, and maybe a process group."""

Coords = Mapping[str, tuple[int, int]]
"""A rank's coordinates: mesh dim name -> (index, size)."""


def parse_mesh(text: str) -> dict[str, int]:
    """Parse a mesh such as `dp=2,tp=4`.

    Raises:
        UsageError: the text has another form, or names a dim twice.
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
    """Return the mesh given by a number of ranks or by dims; exactly one of them must be given.

    Raises:
        UsageError: both or none are given, `mesh` is no mapping, `tp` is missing, or a dim has an
            unknown name or fewer than one rank.
    """
    if (tp is None) == (mesh is None):
        raise UsageError("give either tp, the ranks to split over, or mesh, like dp=2,tp=4")
    if not isinstance(mesh, Mapping | None):
        raise UsageError(f"mesh {mesh!r:.80} is no mapping: give names and ranks, like dict(tp=4)")
    out = {TP: tp} if mesh is None else dict(mesh)
    sizes = {name: size for name, size in out.items() if size is not None}
    for name, size in sizes.items():
        if (fault := fault_of_dim(name, size)) is not None:
            raise UsageError(fault)
    if prod(sizes.values()) > MAX_RANKS:
        raise UsageError(f"{prod(sizes.values()):,} ranks: {MAX_RANKS:,} are the most")
    if TP not in sizes:
        raise UsageError(f"the mesh {dict(sizes)} has no dim 'tp': its ranks split the weights")
    for name in sorted(sizes.keys() - {TP, CP, EP, *BATCH}):
        raise UsageError(
            f"mesh dim '{name}' means nothing here: 'tp' splits weights, 'cp' sequences, 'ep' "
            f"spreads experts, and copies of the model share the batch over {', '.join(BATCH)}"
        )
    return dict(sorted(sizes.items()))  # in the order of a plan file


def fault_of_dim(name: str, size: int) -> str | None:
    """Return what is wrong with a mesh dim of that name and size; None if nothing is."""
    if not isinstance(name, str):
        return f"{name!r:.80} is no name for a mesh dim"
    if not isinstance(size, int) or isinstance(size, bool):
        return f"{name} must be an int, not {size!r:.80}"
    if size < 1:
        return f"{name} must be at least 1, not {size}"
    if size > MAX_RANKS:
        return f"{name}={size} is too large: {MAX_RANKS:,} ranks are the most"
    if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
        return f"'{name:.80}' is no name for a mesh dim: letters, digits and _"
    return None


def fault_of_sub_axes(sizes: Sequence[int], ranks: int) -> str | None:
    """Return what is wrong with these sub-axis sizes for a mesh dim of `ranks` ranks, or None."""
    if not 2 <= len(sizes) <= MAX_SUB_AXES:
        return f"{len(sizes)} sub-axes: a mesh dim has none, or 2 to {MAX_SUB_AXES}"
    if min(sizes) < 2 or prod(sizes) != ranks:
        return f"sub-axes of {list(sizes)} do not make a mesh dim of {ranks} ranks"
    return None


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return "dp=2,tp=4", the inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def batch_dims(mesh: Mapping[str, int]) -> list[str]:
    """Return the mesh dims whose ranks take different sequences of the batch: all but tp and cp."""
    return [name for name in mesh if name not in (TP, CP)]


def replicas(mesh: Mapping[str, int]) -> int:
    """Return the number of model copies that share the batch."""
    return prod(mesh[name] for name in batch_dims(mesh))


def hosts_of(sizes: Sequence[int], chosen: Sequence[bool], per_host: int) -> int:
    """Return the most hosts that ranks are on which differ only in the chosen dims.

    Args:
        sizes: Ranks of all dims; the last varies fastest.
        chosen: Which dims the ranks differ in.
        per_host: Ranks on one host.
    """
    offsets, starts, stride = [0], [0], 1
    for size, differs in zip(reversed(sizes), reversed(chosen), strict=True):
        steps = [stride * i for i in range(size)]
        if differs:
            offsets = [a + step for a in offsets for step in steps]
        else:
            starts = [a + step for a in starts for step in steps]
        stride *= size
    return max(len({(start + a) // per_host for a in offsets}) for start in starts)


def sub_name(mesh: str, numbers: Iterable[int | str]) -> str:
    """Return the name of some sub-axes of mesh dim `mesh`: `tp.0`, or `tp.01` for two of three."""
    return f"{mesh}." + "".join(map(str, numbers))


def with_sub_axes(coords: Coords, sub_axes: Mapping[str, Sequence[int]]) -> Coords:
    """Add to `coords` the coordinates on sub-axes and on combinations of them.

    Args:
        coords: A rank's coordinate on each mesh dim.
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
    """Return a rank's coordinates on mesh dims and sub-axes; the last mesh dim varies fastest.

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
    """Return the mesh dim that `name` is or belongs to: `tp` for `tp.0`."""
    return name.partition(".")[0]


def sub_axes_of(name: str, coords: Coords) -> set[str]:
    """Return the single sub-axes that `name` stands for; `{name}` if its mesh dim has none."""
    dim, _, digits = name.partition(".")
    if digits:
        return {sub_name(dim, [digit]) for digit in digits}
    return {n for n in coords if n.startswith(f"{dim}.") and len(n) == len(dim) + 2} or {name}


def together(bits: Sequence[str], coords: Coords) -> str:
    """Return the one name for these single sub-axes of a mesh dim."""
    dim = mesh_dim_of(bits[0])
    if set(bits) == sub_axes_of(dim, coords):
        return dim
    return sub_name(dim, [bit.rpartition(".")[2] for bit in sorted(bits)])
