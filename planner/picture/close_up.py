"""A weight seen close up: the rows and columns that each rank holds, as a drawing and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shardwright.planner.contract.dims import Concat, Dim, dim_size, is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.ranges import local_ranges
from shardwright.planner.picture.block import Palette
from shardwright.planner.picture.cells import Cell, Striped, grain, names, spans
from shardwright.planner.picture.glyph import sheet, stripes
from shardwright.planner.picture.palette import WHOLE, ink
from shardwright.planner.picture.svg import drawing, tag
from shardwright.planner.picture.weights import Weight

WIDE, LOW, TALL = 250.0, 150.0, 300.0
"""Width of a sheet, and the bounds of its height."""
LEFT, TOP, RIGHT = 96.0, 34.0, 96.0
LABELLED = 40
"""Cells that are labelled one by one."""
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


class CloseUp:
    """A weight, drawn for an id of the page."""

    def __init__(self, weight: Weight, palette: Palette, name: str) -> None:
        self.weight, self.palette, self.name = weight, palette, name
        self.down, self.across = stripes(weight, palette.ranks)
        self.patterns: dict[tuple[int, ...], Markup] = {}

    # --- in words

    @property
    def dims(self) -> list[str]:
        """What is split: dims, each segment of one by itself; of a weight that is whole, none."""
        out = []
        for name, dim in zip(self._names(), self.weight.placement.dims, strict=True):
            if isinstance(dim, Concat) and is_split(dim):
                out += [f"{name} of {self.segment(i)}" for i in range(len(dim.terms))]
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
        text = f"{name.capitalize()} are split: {held} of {dim_size(dim) or 0:,} on a rank"
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
            colour = WHOLE if len(ranks) == len(self.palette.ranks) else self.palette.colours[ranks[0]]
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
        parts, dim = self.weight.item.parts, self.weight.placement.dims[0]
        known = isinstance(dim, Concat) and len(dim.terms) == len(parts)
        return parts[number] if known else f"segment {number + 1}"

    # --- as a drawing

    def draw(self) -> Markup:
        """The sheet, its cells labelled by ranks, its edges by indices."""
        across, down = sheet(self.weight)[1], sheet(self.weight)[0]
        shape = self.weight.shape or (1,)
        flat = across == down
        wide = 90.0 if flat else WIDE
        ratio = shape[down] / max(shape[across], 1)
        high = TALL if flat else min(max(wide * ratio, LOW), TALL)
        if self.down and len(self.down.cells) <= LABELLED:
            high = max(high, 15.0 * len(self.down.cells))
        parts = [tag("rect", x=LEFT, y=TOP, width=wide, height=high, fill=WHOLE)]
        parts += self._cells(wide, high)
        parts += self._ticks(self.down, high, True, shape[down])
        if not flat:
            parts += self._ticks(self.across, wide, False, shape[across])
        parts += self._brackets(high)
        parts.append(tag("rect", x=LEFT, y=TOP, width=wide, height=high, class_="frame"))
        if not self.weight.is_split:
            middle = (LEFT + wide / 2, TOP + high / 2)
            parts.append(tag("text", "whole on each rank", x=middle[0], y=middle[1] + 4, class_="mid"))
        defs = tag("defs", list(self.patterns.values()))
        label = f"Which ranks hold what of {self.weight.name}"
        return drawing(LEFT + wide + RIGHT, TOP + high + 26, label, [defs, *parts])

    def _cells(self, wide: float, high: float) -> list[Markup]:
        rows = self.down.cells if self.down else (None,)
        columns = self.across.cells if self.across else (None,)
        if self.down is None and self.across is None:
            return []
        out: list[Markup] = []
        labelled = len(rows) * len(columns) <= LABELLED
        for row in rows:
            for column in columns:
                ranks = _both(row, column)
                y, h = _place(self.down, row, high)
                x, w = _place(self.across, column, wide)
                out.append(
                    tag("rect", x=LEFT + x, y=TOP + y, width=w, height=h, fill=self._fill(ranks),
                        class_="cell")
                )  # fmt: skip
                if labelled:
                    out += self._label(ranks, LEFT + x, TOP + y, w, h)
        return out

    def _label(self, ranks: tuple[int, ...], x: float, y: float, w: float, h: float) -> list[Markup]:
        text = "all ranks" if len(ranks) == len(self.palette.ranks) > 1 else (
            f"rank{'s' * (len(ranks) > 1)} {names(ranks)}"
        )  # fmt: skip
        if len(text) * 6.4 > w:
            text = names(ranks)
        if len(text) * 6.4 > w or h < 12:
            return []
        middle = x + w / 2, y + h / 2 + 4
        if len(ranks) > 1:  # on stripes: on a plate of its own
            wide = len(text) * 6.4 + 8
            plate = tag("rect", x=middle[0] - wide / 2, y=middle[1] - 11, width=wide, height=15, rx=3,
                        class_="plate")  # fmt: skip
            return [plate, tag("text", text, x=middle[0], y=middle[1], class_="mid small")]
        return [tag("text", text, x=middle[0], y=middle[1], class_="mid small",
                    style=f"fill:{ink(self.palette.colours[ranks[0]])}")]  # fmt: skip

    def _fill(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) == 1:
            return self.palette.colours[ranks[0]]
        if not ranks or len(ranks) == len(self.palette.ranks):
            return WHOLE
        if ranks not in self.patterns:
            name, width = f"{self.name}-p{len(self.patterns)}", 7.0
            bars = [
                tag("rect", x=i * width, y=0, width=width, height=10,
                    fill=self.palette.colours[rank])
                for i, rank in enumerate(ranks)
            ]  # fmt: skip
            self.patterns[ranks] = tag(
                "pattern", bars, id=name, width=width * len(ranks), height=10,
                patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
            )  # fmt: skip
        return f"url(#{self.name}-p{list(self.patterns).index(ranks)})"

    def _ticks(self, side: Striped | None, length: float, down: bool, size: int) -> list[Markup]:
        """Indices where cells begin, and the last one's end; where there is room."""
        marks = [0, size] if side is None else [*(c.start for c in side.cells), side.size]
        scale = length / max(size if side is None else side.size, 1)
        out, last = [], -1e9
        for mark in marks:
            at = mark * scale
            final = mark == marks[-1]
            if at - last < (13 if down else 44) and not final:
                continue
            if final and at - last < (13 if down else 44) and out:
                out.pop()
            last = at
            text = f"{mark:,}"
            if down:
                out.append(tag("text", text, x=LEFT - 6, y=TOP + at + 4, class_="tick right"))
            else:
                out.append(tag("text", text, x=LEFT + at, y=TOP - 6, class_="tick mid"))
        if side is not None and side.repeats > 1:
            words = f"one of {side.repeats:,} alike"
            place = {"x": LEFT, "y": TOP + length + 18} if down else {"x": LEFT, "y": TOP - 20}
            out.append(tag("text", words, class_="small", **place))
        return out

    def _brackets(self, high: float) -> list[Markup]:
        """Segments of a concatenation, named on the right."""
        if self.down is None or len(self.down.segments) < 2:
            return []
        scale, out = high / self.down.size, []
        x = LEFT + (90.0 if len(self.weight.shape) == 1 else WIDE) + 8
        for i, (start, stop) in enumerate(self.down.segments):
            top, end = TOP + start * scale + 2, TOP + stop * scale - 2
            out.append(tag("path", d=f"M{x} {top:.1f} h5 V{end:.1f} h-5", class_="bracket"))
            out.append(tag("text", self.segment(i), x=x + 10, y=(top + end) / 2 + 4, class_="small"))
        return out


def _both(row: Cell | None, column: Cell | None) -> tuple[int, ...]:
    if row is None or column is None:
        cell = row or column
        return cell.ranks if cell else ()
    return tuple(r for r in row.ranks if r in column.ranks)


def _place(side: Striped | None, cell: Cell | None, length: float) -> tuple[float, float]:
    if side is None or cell is None:
        return 0.0, length
    return length * cell.start / side.size, length * (cell.stop - cell.start) / side.size
