"""Shows which ranks hold which part of a weight: cells to draw, a sentence, a table of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.weights import Weight
from shardwright.planner.wording import ranges

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7b3fa0",
    "#12355b", "#a4d13a", "#8c5a3c", "#ff9c9c", "#005f3c", "#c3b1f2", "#800f2f", "#7fd8c8",
)  # fmt: skip
"""Rank colours in order. The first seven are Okabe and Ito's, for all kinds of colour vision."""
REPLICATED = "var(--replicated)"
"""The colour of parts that every rank holds."""
DRAWN, LISTED, LABELLED = 4096, 64, 64
"""Most pieces of a dim that are drawn separately, ranks in a table, and cells with a label."""
WIDTH, LOWEST, HIGHEST = 380.0, 120.0, 300.0
"""Size of the drawing of a weight in pixels."""


def ranks_of(plan: Plan) -> list[Coords]:
    """Return the coordinates of the ranks of one model copy, by their index on `tp`."""
    others = plan.mesh.keys() - {TP}
    every = (plan.coords(rank) for rank in range(plan.world_size))
    first = [at for at in every if all(at[name][0] == 0 for name in others)]
    return sorted(first, key=lambda at: at[TP][0])


def colour(rank: int) -> str:
    """Return the colour of a rank."""
    return COLOURS[rank % len(COLOURS)]


@dataclass(frozen=True)
class Piece:
    """A range of a dim, and the ranks that hold it."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Side:
    """One period of a dim as pieces; it has `size` indices and is repeated `repeats` times."""

    pieces: tuple[Piece, ...]
    repeats: int
    size: int


def side_of(dim: Dim, ranks: Sequence[Coords]) -> Side:
    """Divide a dim into pieces."""
    repeats, dim = _period(dim, len(ranks))
    size = dim_size(dim) or 0
    held = [local_ranges(dim, at) for at in ranks]
    terms = dim.terms if isinstance(dim, Concat) else (dim,)
    ends = [sum(dim_size(t) or 0 for t in terms[:i]) for i in range(len(terms) + 1)]
    marks = sorted({*ends, *(edge for parts in held for one in parts for edge in one)})
    holders: dict[int, list[int]] = {start: [] for start in marks}
    for rank, parts in enumerate(held):
        for start, stop in parts:
            for mark in marks[marks.index(start) : marks.index(stop)]:
                holders[mark].append(rank)
    found = [Piece(a, b, tuple(holders[a])) for a, b in zip(marks, marks[1:], strict=False)]
    return Side(tuple(found), repeats, size)


def _period(dim: Dim, ranks: int) -> tuple[int, Dim]:
    """Return the repeats and the period of a dim with too many pieces to draw; otherwise 1."""
    if not isinstance(dim, Product) or not is_split(dim):
        return 1, dim
    first = next(i for i, factor in enumerate(dim.factors) if is_split(factor))
    repeats = prod(dim_size(factor) or 1 for factor in dim.factors[:first])
    if repeats <= 4 and pieces(dim) * ranks <= DRAWN:
        return 1, dim
    rest = dim.factors[first:]
    return repeats, rest[0] if len(rest) == 1 else Product(rest)


@dataclass(frozen=True)
class Cell:
    """A rectangle of a weight: place and size in percent, fill, and a label if it fits."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str


@dataclass(frozen=True)
class Row:
    """What some ranks hold: the indices of each sharded dim, local shape and bytes."""

    ranks: str
    colour: str
    held: list[str]
    shape: str
    bytes: int


class Sheet:
    """A weight as a sheet of cells; `drawn` are its dims down and across, sharded ones first."""

    def __init__(self, weight: Weight, ranks: Sequence[Coords]) -> None:
        self.weight, self.ranks = weight, ranks
        dims = weight.placement.dims
        split = [i for i, dim in enumerate(dims) if is_split(dim)][:2]
        others = [i for i in reversed(range(len(dims))) if i not in split]
        self.drawn = sorted([*split, *others][:2])

    @property
    def height(self) -> float:
        """Return the height of the large drawing in pixels, from the shape, within limits."""
        if len(self.drawn) < 2:
            return LOWEST / 2
        down, across = (self.weight.shape[i] for i in self.drawn)
        return min(max(WIDTH * down / max(across, 1), LOWEST), HIGHEST)

    @cached_property
    def cells(self) -> list[Cell]:
        """Return the cells; none if nothing is sharded."""
        if not self.weight.is_split:
            return []
        down, across = [None, None, *map(self._side, self.drawn)][-2:]
        rows, columns = (_placed(side) if side else [(0.0, 1.0, None)] for side in (down, across))
        many = len(rows) * len(columns) > LABELLED
        return [
            self._cell(x, y, width, height, _both(held, also), many)
            for y, height, held in rows
            for x, width, also in columns
        ]

    def _side(self, i: int) -> Side | None:
        dim = self.weight.placement.dims[i]
        return side_of(dim, self.ranks) if is_split(dim) else None

    def _cell(
        self, x: float, y: float, width: float, height: float, held: tuple[int, ...], many: bool
    ) -> Cell:
        label = "all ranks" if len(held) == len(self.ranks) else f"rank {names(held)}"
        if len(label) * 6.5 > width * WIDTH:
            label = names(held)
        fits = len(label) * 6.5 <= width * WIDTH and height * self.height >= 13
        x, y, width, height = (round(100 * n, 2) for n in (x, y, width, height))
        text = label if fits and held and not many else ""
        return Cell(x, y, width, height, self.fill(held), text)

    def fill(self, held: Sequence[int]) -> str:
        """Return the background of a part: the colour of its rank, or stripes of several."""
        if len(held) in (0, len(self.ranks)):
            return REPLICATED
        if len(held) == 1:
            return colour(held[0])
        stripes = ", ".join(f"{colour(r)} {7 * i}px {7 * i + 7}px" for i, r in enumerate(held))
        return f"repeating-linear-gradient(45deg, {stripes})"

    @property
    def sentence(self) -> str:
        """Return a sentence on how the weight is sharded."""
        if not self.weight.is_split:
            return "Replicated: every rank holds all of it."
        dims = zip(self._dim_names(), self.weight.placement.dims, strict=True)
        words = [self._split(name, dim) for name, dim in dims if is_split(dim)]
        sides = [side for i in self.drawn if (side := self._side(i)) is not None]
        most = max((len(p.ranks) for s in sides for p in s.pieces), default=1)
        if len(sides) == 1 and most > 1:
            every = most == len(self.ranks)
            words.append(
                "Grey parts are on every rank." if every else
                f"Striped parts are on {most} ranks each."
            )  # fmt: skip
        return " ".join(words)

    def _dim_names(self) -> list[str]:
        n = len(self.weight.shape)
        return {1: ["elements"], 2: ["rows", "columns"]}.get(n, [f"dim {i}" for i in range(n)])

    def _split(self, name: str, dim: Dim) -> str:
        held = " or ".join(f"{n:,}" for n in sorted({dim_size(dim, at) or 0 for at in self.ranks}))
        text = f"{name.capitalize()}: {held} of {dim_size(dim):,} on a rank"
        if isinstance(dim, Concat):
            parts = [self._segment(i) for i in range(len(dim.terms))]
            return f"{text}, a part of each of {', '.join(parts)} ({grain(dim)})."
        groups = grain(dim)
        return f"{text}{f', in {groups}' if groups else ''}."

    @property
    def headings(self) -> list[str]:
        """Return the headings of `rows`: sharded dims, or each segment of a concatenation."""
        out = []
        for name, dim in zip(self._dim_names(), self.weight.placement.dims, strict=True):
            if isinstance(dim, Concat) and is_split(dim):
                out += [self._segment(i) for i in range(len(dim.terms))]
            elif is_split(dim):
                out.append(name)
        return out

    def _segment(self, number: int) -> str:
        """Return a segment's name: what attention uses it as, if known."""
        parts, dims = self.weight.item.parts, self.weight.placement.dims
        known = any(isinstance(dim, Concat) and len(dim.terms) == len(parts) for dim in dims)
        return parts[number] if known else f"segment {number + 1}"

    @property
    def rows(self) -> list[Row]:
        """Return what each rank holds; ranks that hold the same share a row."""
        split = [dim for dim in self.weight.placement.dims if is_split(dim)]
        found = grouped(
            (tuple(text for dim in split for text in _held(dim, at)), rank)
            for rank, at in enumerate(self.ranks)
        )
        out = []
        for held, ranks in list(found.items())[:LISTED]:
            at = self.ranks[ranks[0]]
            shape = " × ".join(f"{n:,}" for n in self.weight.placement.local_shape(at) if n)
            fill = REPLICATED if len(ranks) == len(self.ranks) else colour(ranks[0])
            out.append(Row(names(ranks), fill, [*held], shape, self.weight.bytes_at(at)))
        return out


def _placed(side: Side) -> list[tuple[float, float, tuple[int, ...] | None]]:
    """Return (start, length, ranks) of each piece, as shares of the side."""
    size = max(side.size, 1)
    return [(p.start / size, (p.stop - p.start) / size, p.ranks) for p in side.pieces]


def _both(held: tuple[int, ...] | None, also: tuple[int, ...] | None) -> tuple[int, ...]:
    if held is None or also is None:
        return held or also or ()
    return tuple(rank for rank in held if rank in also)


def _held(dim: Dim, at: Coords) -> list[str]:
    """Return a rank's indices of a dim; for a concatenation, those in each segment."""
    start, out = 0, []
    for term in dim.terms if isinstance(dim, Concat) else (dim,):
        out.append(spans([(a + start, b + start) for a, b in local_ranges(term, at)]))
        start += dim_size(term) or 0
    return out


def grain(dim: Dim) -> str:
    """Return the units that a dim is split in: `32 groups of 128`; empty for single indices."""
    if isinstance(dim, Concat):
        return " + ".join(grain(term) or f"{dim_size(term):,}" for term in dim.terms)
    if isinstance(dim, Atom) or not is_split(dim):
        return "" if is_split(dim) else f"{dim_size(dim)} replicated"
    last = max(i for i, factor in enumerate(dim.factors) if is_split(factor))
    number, after = (prod(dim_size(f) or 1 for f in part)
                     for part in (dim.factors[: last + 1], dim.factors[last + 1 :]))  # fmt: skip
    return f"{number:,} groups of {after:,}" if after > 1 else ""


def spans(ranges: list[Range]) -> str:
    """Write ranges in words, one per line: `0–511,` and `4096–4223`."""
    texts = [f"{a:,}–{b - 1:,}" if b - a > 1 else f"{a:,}" for a, b in ranges[:6]]
    more = len(ranges) - 6
    return ",\n".join(texts) + (f"\nand {more:,} more" if more > 0 else "")


def names(ranks: Iterable[int]) -> str:
    """Write ranks in words: `0–3, 6`."""
    return ranges(ranks, "–")
