"""The mesh that a plan is for: `tp`, which splits weights, and dims whose ranks share the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from shardwright.errors import UsageError

TP = "tp"


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=2,tp=4` as a mesh.

    Raises:
        UsageError: it is not written so, or names a dim twice.
    """
    out: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not (size.isascii() and size.isdigit()):
            raise UsageError(f"'{text}' is not a mesh: write names and ranks, like dp=2,tp=4")
        if name in out:
            raise UsageError(f"mesh dim '{name}' is named twice in '{text}'")
        out[name] = int(size)
    return read_mesh(None, out)


def read_mesh(tp: int | None, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """The mesh that is asked for by a number of ranks, or by dims; one of these must be given.

    Raises:
        UsageError: both are given or none; a dim is missing, misnamed, or has no rank.
    """
    if (tp is None) == (mesh is None):
        raise UsageError("give either tp, the ranks to split over, or mesh, like dp=2,tp=4")
    out = {TP: tp} if mesh is None else dict(mesh)
    sizes = {name: size for name, size in out.items() if size is not None}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} must be at least 1, not {size}")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"'{name}' is no name for a mesh dim: letters, digits and _")
    if TP not in sizes:
        raise UsageError(f"the mesh {dict(sizes)} has no dim 'tp': its ranks split the weights")
    return sizes


def batch_dims(mesh: Mapping[str, int]) -> list[str]:
    """The mesh dims whose ranks take different sequences of the batch: all but tp."""
    return [name for name in mesh if name != TP]


def replicas(mesh: Mapping[str, int]) -> int:
    """Copies of the model that share the batch."""
    return prod(mesh[name] for name in batch_dims(mesh))
