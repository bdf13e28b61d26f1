"""A phase as a line of time: what is computed, and what ranks send each other meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from shardwright.planner.contract.plan_figures import DrawnBlock, DrawnItem, Phase
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.block import is_aside
from shardwright.planner.picture.svg import LETTER, drawing, fitted, tag
from shardwright.planner.picture.words import label, short
from shardwright.planner.units import human_time

LANE, MARGIN = 26.0, 4.0
TEXT = 16.0
LANES = ("compute", "communicate")


@dataclass(frozen=True)
class Span:
    """Something that takes time: a run of like items of a stack is one, with how many they are."""

    name: str
    lane: str
    ns: int
    within: tuple[Span, ...] = ()
    times: int = 1

    @property
    def total(self) -> int:
        """Nanoseconds of all of them."""
        return self.times * (sum(s.total for s in self.within) if self.within else self.ns)

    def lane_ns(self, lane: str) -> int:
        """Those of one lane."""
        if self.within:
            return self.times * sum(s.lane_ns(lane) for s in self.within)
        return self.times * self.ns * (self.lane == lane)


def spans(blocks: list[DrawnBlock], number: int, phase: Phase) -> list[Span]:
    """What a block spends in a phase, in its order."""
    out: list[Span] = []
    for item in blocks[number].items:
        for within, times in item.blocks.items():
            inside = tuple(spans(blocks, int(within), phase))
            out.append(Span(f"{item.module} × {times}", "", 0, inside, times))
        if ns := item.phase_ns.get(phase, 0):
            out.append(Span(_name(item), LANES[item.slot is not None], ns))
    return out


def _name(item: DrawnItem) -> str:
    if item.slot is not None:
        found = [c.kind.replace("_", "-") for c in item.collectives if c.phase != "backward"]
        return found[0] if found else "copy"
    if is_aside(item):
        return "rest"
    return short(item.module) if item.module else label(item)


def shares(plan: Plan, phase: Phase) -> tuple[int, int]:
    """Nanoseconds of a phase that are computed, and in which ranks send."""
    found = spans(plan.drawing, 0, phase)
    compute, send = (sum(s.lane_ns(lane) for s in found) for lane in LANES)
    return compute, send


def line(found: list[Span], name: str, what: str, width: float) -> Markup:
    """The line of time.

    Args:
        found: What takes it.
        name: An id that nothing else of the page has.
        what: What it is the line of.
        width: Of the drawing.
    """
    total = max(sum(s.total for s in found), 1)
    scale = width / total
    x, parts, defs, last = 0.0, [], [], -1.0
    for i, span in enumerate(found):
        wide = span.total * scale
        if span.within:
            one = wide / span.times
            key = f"{name}-{i}"
            defs.append(tag("g", list(_boxes(list(span.within), one)), id=key))
            parts += [tag("use", href=f"#{key}", x=f"{x + n * one:.2f}") for n in range(span.times)]
        else:
            parts += list(_boxes([span], wide, x))
        if span.within and len(span.name) * 11 * LETTER < wide and x > last:
            y = TEXT - 5
            parts.append(tag("text", span.name, x=x + 1, y=y, class_="small"))
            last = x + len(span.name) * 11 * LETTER
        x += wide
    high = TEXT + 2 * LANE + MARGIN
    parts.append(tag("line", x1=0, x2=width, y1=high, y2=high, class_="axis"))
    ends = [("0", 0.0, ""), (human_time(total), width, "right")]
    parts += [tag("text", t, x=at, y=high + 14, class_=f"tick {c}".strip()) for t, at, c in ends]
    return drawing(width, high + 18, what, [tag("defs", defs), *parts])


def _boxes(found: list[Span], wide: float, x: float = 0.0) -> Iterator[Markup]:
    """Boxes of some spans, in so much room; those that are too short to be seen are joined."""
    total = max(sum(s.total for s in found), 1)
    for span in _flat(found):
        w = wide * span.ns / total
        y = TEXT + (LANE + MARGIN / 2) * LANES.index(span.lane)
        title = tag("title", f"{span.name}: {human_time(span.ns)}")
        if w >= 0.05:
            yield tag("rect", title, x=f"{x:.2f}", y=y, width=f"{w:.2f}", height=LANE - 2,
                      class_=f"span {span.lane}{' apart' * (w > 5)}")  # fmt: skip
        if w > 44:
            text = fitted(span.name, w - 8, 11)
            yield tag("text", text, x=x + 5, y=y + LANE / 2 + 3, class_=f"on {span.lane}")
        x += w


def _flat(found: list[Span]) -> Iterator[Span]:
    for span in found:
        if span.within:
            for _ in range(span.times):
                yield from _flat(list(span.within))
        else:
            yield span
