"""Which part of a weight each rank holds, in words and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.contract.dims import Concat, Dim, dim_size, is_split, local_ranges
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.picture.cells import grain, names, spans
from shardwright.planner.picture.glyph import stripes
from shardwright.planner.picture.palette import WHOLE, Palette
from shardwright.planner.picture.weights import Weight

LISTED = 64
"""Ranks that are listed."""


@dataclass(frozen=True)
class Row:
    """What some ranks hold."""

    ranks: str
    colour: str
    held: list[str]
    shape: str
    bytes: int


class Held:
    """Says of a weight which ranks hold what."""

    def __init__(self, weight: Weight, palette: Palette) -> None:
        self.weight, self.palette = weight, palette
        self.down, self.across = stripes(weight, palette.ranks)

    @property
    def dims(self) -> list[str]:
        """What is split: dims, each segment of one by itself; of a weight that is whole, none."""
        out = []
        for name, dim in zip(self._names(), self.weight.placement.dims, strict=True):
            if isinstance(dim, Concat) and is_split(dim):
                out += [self.segment(i) for i in range(len(dim.terms))]
            elif is_split(dim):
                out.append(name)
        return out

    def _names(self) -> list[str]:
        n = len(self.weight.shape)
        return ["rows", "columns"] if n == 2 else [f"dim {i}" for i in range(n)] if n > 1 else [
            "elements"
        ]  # fmt: skip

    @property
    def sentence(self) -> str:
        """How it lies, in a sentence."""
        ranks = len(self.palette.ranks)
        if not self.weight.is_split:
            return f"Whole on {'the rank' if ranks == 1 else f'each of the {ranks} ranks'}."
        parts = [
            self._split(name, i)
            for i, name in enumerate(self._names())
            if is_split(self.weight.placement.dims[i])
        ]
        shared = self._shared()
        return " ".join([*parts, *([shared] if shared else [])])

    def _split(self, name: str, i: int) -> str:
        dim = self.weight.placement.dims[i]
        sizes = sorted({dim_size(dim, at) or 0 for at in self.palette.ranks})
        held = " or ".join(f"{n:,}" for n in sizes)
        verb = "are" if name.endswith("s") else "is"
        text = f"{name.capitalize()} {verb} split: {held} of {dim_size(dim) or 0:,} on a rank"
        if isinstance(dim, Concat):
            names = [self.segment(n) for n in range(len(dim.terms))]
            return f"{text}, of {', '.join(names)} each its part ({grain(dim)})."
        groups = grain(dim)
        return f"{text}{f', {groups} that stay together' if groups else ''}."

    def _shared(self) -> str:
        cells = [c for side in (self.down, self.across) if side for c in side.cells]
        most = max((len(c.ranks) for c in cells), default=1)
        ranks = len(self.palette.ranks)
        both = self.down is not None and self.across is not None
        if both or most < 2:
            return ""
        if most == ranks:
            return "What is grey is whole on every rank."
        return f"What has stripes of several colours is held by {most} ranks each."

    @property
    def rows(self) -> list[Row]:
        """What each rank holds; ranks that hold the same are one row."""
        found: dict[tuple[str, ...], list[int]] = {}
        for rank, at in enumerate(self.palette.ranks):
            dims = (dim for dim in self.weight.placement.dims if is_split(dim))
            held = tuple(words for dim in dims for words in self._held(dim, at))
            found.setdefault(held, []).append(rank)
        out = []
        for held, ranks in list(found.items())[:LISTED]:
            at = self.palette.ranks[ranks[0]]
            shape = " × ".join(f"{n:,}" for n in self.weight.placement.local_shape(at) if n)
            colour = (
                WHOLE if len(ranks) == len(self.palette.ranks) else self.palette.colours[ranks[0]]
            )
            out.append(Row(names(tuple(ranks)), colour, [*held], shape, self.weight.bytes_at(at)))
        return out

    @staticmethod
    def _held(dim: Dim, at: Coords) -> list[str]:
        """The indices of a dim that a rank holds; of a concatenation, those in each segment."""
        terms, end, out = dim.terms if isinstance(dim, Concat) else (dim,), 0, []
        for term in terms:
            out.append(spans([(a + end, b + end) for a, b in local_ranges(term, at)]))
            end += dim_size(term) or 0
        return out

    def segment(self, number: int) -> str:
        """What a segment is called."""
        parts, dims = self.weight.item.parts, self.weight.placement.dims
        known = any(isinstance(dim, Concat) and len(dim.terms) == len(parts) for dim in dims)
        return parts[number] if known else f"segment {number + 1}"
