"""Which ranks hold which part of a dim: what the stripes of a weight are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.planner.contract.dims import (
    Atom,
    Concat,
    Dim,
    Product,
    Range,
    dim_size,
    is_split,
    local_ranges,
    pieces,
)
from shardwright.planner.contract.mesh import TP, Coords
from shardwright.planner.contract.plan_file import Plan

MOST = 4096
"""Pieces of a dim that are drawn one by one."""


@dataclass(frozen=True)
class Cell:
    """Indices of a dim, and the ranks that hold them."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Striped:
    """A dim by who holds what.

    Attributes:
        cells: Of one period.
        segments: Where a concatenation is cut, in the same period: (first index, last + 1).
        repeats: How often the period stands in the dim.
        size: Of one period.
    """

    cells: tuple[Cell, ...]
    segments: tuple[Range, ...]
    repeats: int
    size: int


def ranks_of(plan: Plan) -> list[Coords]:
    """Where each rank stands that takes part in one copy of the model."""
    found = (plan.coords(rank) for rank in range(plan.world_size))
    others = plan.mesh.keys() - {TP}
    first = [at for at in found if all(at[name][0] == 0 for name in others)]
    return sorted(first, key=lambda at: at[TP][0])


def striped(dim: Dim, ranks: list[Coords]) -> Striped:
    """A dim by who holds what."""
    repeats, dim = _period(dim, len(ranks))
    size = dim_size(dim) or 0
    held = [local_ranges(dim, at) for at in ranks]
    marks = sorted({0, size, *(edge for ranges in held for one in ranges for edge in one)})
    terms = dim.terms if isinstance(dim, Concat) else ()
    ends = [sum(dim_size(t) or 0 for t in terms[:i]) for i in range(len(terms) + 1)]
    marks = sorted({*marks, *ends})
    holders: dict[int, list[int]] = {a: [] for a in marks}
    for rank, ranges in enumerate(held):
        for start, stop in ranges:
            for a in marks[marks.index(start) : marks.index(stop)]:
                holders[a].append(rank)
    cells = [Cell(a, b, tuple(holders[a])) for a, b in zip(marks, marks[1:], strict=False)]
    segments = tuple(zip(ends, ends[1:], strict=False)) if terms else ((0, size),)
    return Striped(tuple(cells), segments, repeats, size)


def _period(dim: Dim, ranks: int) -> tuple[int, Dim]:
    """How often a dim repeats what it is made of, where that is often; else once."""
    if not isinstance(dim, Product) or not is_split(dim):
        return 1, dim
    first = next(i for i, factor in enumerate(dim.factors) if is_split(factor))
    repeats = prod(dim_size(factor) or 1 for factor in dim.factors[:first])
    if repeats <= 4 and pieces(dim) * ranks <= MOST:
        return 1, dim
    rest = dim.factors[first:]
    return repeats, rest[0] if len(rest) == 1 else Product(rest)


def grain(dim: Dim) -> str:
    """What a dim is made of where it is split: `32 groups of 128`; empty for single indices."""
    if isinstance(dim, Concat):
        return " + ".join(grain(term) or f"{dim_size(term):,}" for term in dim.terms)
    if isinstance(dim, Atom):
        return "" if dim.mesh else f"{dim.size} whole"
    split = [i for i, factor in enumerate(dim.factors) if is_split(factor)]
    if not split:
        return f"{dim_size(dim)} whole"
    after = prod(dim_size(f) or 1 for f in dim.factors[split[-1] + 1 :])
    number = prod(dim_size(f) or 1 for f in dim.factors[: split[-1] + 1])
    return f"{number:,} groups of {after:,}" if after > 1 else ""


def spans(ranges: list[Range], most: int = 6) -> str:
    """Ranges in words, one a line: `0–511,` and `4096–4223`."""
    texts = [f"{a:,}–{b - 1:,}" if b - a > 1 else f"{a:,}" for a, b in ranges[:most]]
    more = len(ranges) - most
    return ",\n".join(texts) + (f"\nand {more:,} more" if more > 0 else "")


def names(ranks: Mapping[int, object] | tuple[int, ...]) -> str:
    """Ranks in words: `0–3, 6`."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] + 1 == rank:
            rows[-1][-1] = rank
        else:
            rows.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in rows)
