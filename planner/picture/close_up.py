"""A weight seen close up: a sheet of cells, with the ranks that hold them and their indices."""

from __future__ import annotations

from markupsafe import Markup

from shardwright.planner.picture.cells import Striped, names
from shardwright.planner.picture.glyph import crossed, extent, shared, sheet
from shardwright.planner.picture.held import Held
from shardwright.planner.picture.palette import WHOLE, Palette, ink
from shardwright.planner.picture.svg import drawing, tag
from shardwright.planner.picture.weights import Weight

WIDE, LOW, TALL = 250.0, 150.0, 300.0
"""Width of a sheet, and the bounds of its height."""
LEFT, TOP, RIGHT = 96.0, 34.0, 96.0
LABELLED = 40
"""Cells that are labelled one by one."""


class CloseUp(Held):
    """A weight, drawn for an id of the page."""

    def __init__(self, weight: Weight, palette: Palette, name: str) -> None:
        super().__init__(weight, palette)
        self.name = name
        self.patterns: dict[tuple[int, ...], Markup] = {}

    def draw(self) -> Markup:
        """The sheet, its cells labelled by ranks, its edges by indices."""
        across, down = sheet(self.weight)[1], sheet(self.weight)[0]
        shape: tuple[int, ...] = self.weight.shape or (1,)
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
        parts += self._brackets(wide, high)
        parts.append(tag("rect", x=LEFT, y=TOP, width=wide, height=high, class_="frame"))
        if not self.weight.is_split:
            middle = (LEFT + wide / 2, TOP + high / 2)
            parts.append(
                tag("text", "whole on each rank", x=middle[0], y=middle[1] + 4, class_="mid")
            )
        defs = tag("defs", list(self.patterns.values()))
        label = f"Which ranks hold what of {self.weight.name}"
        return drawing(LEFT + wide + RIGHT, TOP + high + 26, label, [defs, *parts])

    def _cells(self, wide: float, high: float) -> list[Markup]:
        out: list[Markup] = []
        found = [*crossed(self.down, self.across)]
        for row, column in found:
            ranks = shared(row, column)
            y, h = extent(self.down, row, high)
            x, w = extent(self.across, column, wide)
            out.append(
                tag("rect", x=LEFT + x, y=TOP + y, width=w, height=h, fill=self._fill(ranks),
                    class_="cell")
            )  # fmt: skip
            if len(found) <= LABELLED:
                out += self._label(ranks, LEFT + x, TOP + y, w, h)
        return out

    def _label(
        self, ranks: tuple[int, ...], x: float, y: float, w: float, h: float
    ) -> list[Markup]:
        text = "all ranks" if len(ranks) == len(self.palette.ranks) > 1 else (
            f"rank{'s' * (len(ranks) > 1)} {names(ranks)}"
        )  # fmt: skip
        if len(text) * 6.4 > w:
            text = names(ranks)
        if not ranks or len(text) * 6.4 > w or h < 12:
            return []
        middle = x + w / 2, y + h / 2 + 4
        if len(ranks) > 1:  # on stripes: on a plate of its own
            wide = len(text) * 6.4 + 8
            x, y = middle[0] - wide / 2, middle[1] - 11
            plate = tag("rect", x=x, y=y, width=wide, height=15, rx=3, class_="plate")
            return [plate, tag("text", text, x=middle[0], y=middle[1], class_="mid small")]
        return [tag("text", text, x=middle[0], y=middle[1], class_="mid small",
                    style=f"fill:{ink(self.palette.fill(ranks))}")]  # fmt: skip

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

    def _brackets(self, wide: float, high: float) -> list[Markup]:
        """Segments of a concatenation, named on the right, or below."""
        out = []
        for side, length in ((self.down, high), (self.across, wide)):
            if side is None or len(side.segments) < 2:
                continue
            for i, (start, stop) in enumerate(side.segments):
                a, b = start * length / side.size + 2, stop * length / side.size - 2
                if side is self.down:
                    x, y = LEFT + wide + 8, TOP + a
                    path, kind = f"M{x} {y:.1f} h5 v{b - a:.1f} h-5", ""
                    at = x + 10, y + (b - a) / 2 + 4
                else:
                    x, y = LEFT + a, TOP + high + 5
                    path, kind = f"M{x:.1f} {y} v4 h{b - a:.1f} v-4", "mid"
                    at = x + (b - a) / 2, y + 16
                text = tag("text", self.segment(i), x=at[0], y=at[1], class_=f"small {kind}")
                out += [tag("path", d=path, class_="bracket"), text]
        return out
