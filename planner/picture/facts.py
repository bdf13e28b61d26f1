"""What stands on the page, in words: figures, costs, what is said of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.close_up import CloseUp
from shardwright.planner.picture.weights import Weight
from shardwright.planner.units import human_bytes

if TYPE_CHECKING:  # they import torch, and a plan is shown without
    from shardwright.planner.report.explain import Explanation
    from shardwright.planner.report.hand_written import HandWritten


@dataclass(frozen=True)
class Shown:
    """A plan to be shown, and what is known beside it.

    Attributes:
        plan: The plan.
        name: What it is called: its file, say.
        hand: transformers' own table, priced.
        explained: What alternatives would cost.
    """

    plan: Plan
    name: str = ""
    hand: HandWritten | None = None
    explained: Sequence[Explanation] = field(default=())


@dataclass(frozen=True)
class Figure:
    """A fact: what it is of, in words, as a number where it is one, and more of it."""

    label: str
    text: str
    value: int | None = None
    more: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Cost:
    """What a block takes in a phase, in words: collectives, time, of it communication, of all."""

    phase: str
    collectives: str
    time: str
    sent: str
    all: str


@dataclass(frozen=True)
class Block:
    """A distinct block: its id, what it is called, how many there are, and its drawings."""

    id: str
    title: str
    count: int
    costs: list[Cost]
    drawing: Markup
    lines: list[tuple[str, Markup]]


@dataclass(frozen=True)
class Weighed:
    """A weight on the page, shown with the `first` of its module."""

    id: str
    first: str
    weight: Weight
    close: CloseUp
    words: str
    owner: str
    pin: str | None
    reason: str | None
    explained: Explanation | None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(what, in words) beside the drawing."""
        weight = self.weight
        shape = " × ".join(f"{n:,}" for n in weight.shape)
        many = f", × {weight.count} alike" if weight.count > 1 else ""
        out = [
            ("shape", f"{shape}: {human_bytes(weight.whole_bytes)}{many}"),
            ("module", f"{self.owner}, as {weight.layer}"),
            ("placement", weight.entry.placement if weight.entry else self.words),
        ]
        if weight.entry and weight.entry.use:
            out.append(("used as", weight.entry.use))
        if weight.item.source:
            out.append(("code", weight.item.source))
        if self.pin:
            out.append(("pinned", self.pin))
        if self.reason:
            out.append(("why whole", self.reason))
        return out


def phase_in_words(phase: str) -> str:
    """A phase, run once."""
    return {"decode": "a step of decoding", "train": "a step of training"}.get(phase, phase)
