"""What a rank's memory is for, as a stacked bar."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.svg import drawing, tag
from shardwright.planner.units import human_bytes
from shardwright.planner.wording import HELD

WIDE, HIGH = 760.0, 34.0


@dataclass(frozen=True)
class Use:
    """What some of the memory is for; `kind` is the class of its colour."""

    name: str
    kind: str
    bytes: int


def uses(plan: Plan) -> list[Use]:
    """What the fullest rank holds, what is nothing left out."""
    held = plan.predicted.memory or Memory(parameters=max(plan.predicted.parameter_bytes))
    found = [Use(word, field, getattr(held, field)) for field, word in HELD.items()]
    return [use for use in found if use.bytes]


def bar(plan: Plan) -> Markup:
    """The bar, as long as all of it; it is stretched to the width of the page."""
    found = uses(plan)
    total, x, parts = max(sum(u.bytes for u in found), 1), 0.0, []
    for use in found:
        wide = WIDE * use.bytes / total
        title = tag("title", f"{use.name} {human_bytes(use.bytes)}")
        place = {"x": f"{x:.2f}", "y": 0, "width": f"{wide:.2f}", "height": HIGH}
        parts.append(tag("rect", title, class_=f"memory {use.kind}", **place))
        x += wide
    label = "Memory of the fullest rank by what it is for"
    return tag("svg", parts, viewBox=f"0 0 {WIDE:.0f} {HIGH:.0f}", class_="stretched",
               preserveAspectRatio="none", role="img", aria_label=label)  # fmt: skip


def rank_bars(plan: Plan, colours: list[str]) -> Markup | None:
    """Parameters of each rank, where they differ; None where they do not."""
    sizes = plan.predicted.parameter_bytes
    if len({*sizes}) < 2 or len(sizes) > 64:
        return None
    row, most, parts = 18.0, max(sizes), []
    for rank, size in enumerate(sizes):
        y, wide = rank * row, 480 * size / most
        colour = colours[plan.coords(rank)["tp"][0]]
        parts += [
            tag("text", f"rank {rank}", x=58, y=y + 12, class_="small right"),
            tag("rect", x=66, y=y + 2, width=wide, height=row - 5, fill=colour),
            tag("text", human_bytes(size), x=66 + wide + 6, y=y + 12, class_="small"),
        ]
    return drawing(WIDE, row * len(sizes), "Parameters of each rank", parts)
