"""Which indices of a dim each rank holds."""

from __future__ import annotations

from shardwright.planner.contract.dims import (
    Atom,
    Concat,
    Dim,
    Product,
    Range,
    atoms,
    dim_size,
    is_split,
    shard_range,
)
from shardwright.planner.contract.mesh import Coords

MOST_PIECES = 1 << 20
"""Ranges of one dim on one rank: more than that is no layout of a tensor that there is."""


def pieces(dim: Dim) -> int:
    """At most how many ranges of `dim` a rank holds."""
    if isinstance(dim, Atom):
        return 1
    if isinstance(dim, Concat):
        return sum(map(pieces, dim.terms))
    out = before = 1
    for factor in dim.factors:
        if is_split(factor):
            out = before * pieces(factor)
        before *= dim_size(factor) or 1
    return out


def local_ranges(dim: Dim, coords: Coords) -> list[Range]:
    """The indices of `dim` that a rank holds, as merged ranges in the order it holds them."""
    size = dim_size(dim)
    assert size is not None, f"resolve() the run-time size of '{dim}' first"
    if isinstance(dim, Atom):
        return _merge([shard_range(size, *coords[dim.mesh]) if dim.mesh else (0, size)])
    out: list[Range] = []
    if isinstance(dim, Concat):
        offset = 0
        for term in dim.terms:
            out += [(offset + a, offset + b) for a, b in local_ranges(term, coords)]
            offset += dim_size(term) or 0
        return _merge(out)
    out = [(0, 1)]
    for factor in dim.factors:
        n, inner = dim_size(factor) or 0, local_ranges(factor, coords)
        if inner == [(0, n)]:
            out = [(a * n, b * n) for a, b in out]
        else:
            out = [
                (i * n + a, i * n + b) for lo, hi in out for i in range(lo, hi) for a, b in inner
            ]
    return _merge(out)


def _merge(ranges: list[Range]) -> list[Range]:
    out: list[Range] = []
    for a, b in ranges:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def uncovered_ranges(dim: Dim, mesh: str) -> list[Range]:
    """The indices of `dim` that every rank of mesh dim `mesh` holds."""
    size = dim_size(dim)
    assert size is not None, f"resolve() the run-time size of '{dim}' first"
    if mesh not in {a.mesh for a in atoms(dim)}:
        return [(0, size)]
    if isinstance(dim, Concat):
        out: list[Range] = []
        offset = 0
        for term in dim.terms:
            out += [(offset + a, offset + b) for a, b in uncovered_ranges(term, mesh)]
            offset += dim_size(term) or 0
        return _merge(out)
    if isinstance(dim, Product):
        out = [(0, 1)]
        for factor in dim.factors:
            n, inner = dim_size(factor) or 0, uncovered_ranges(factor, mesh)
            out = [
                (i * n + a, i * n + b) for lo, hi in out for i in range(lo, hi) for a, b in inner
            ]
        return _merge(out)
    return []
