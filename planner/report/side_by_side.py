"""A plan and a hand-written one as a table for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from shardwright.planner.contract.plan_figures import Prediction
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.report.hand_written import HandWritten
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import placement_in_words

LARGE = 0.01
"""What is left whole is listed from this share of all bytes on."""


def as_json(plan: Plan, hand: HandWritten) -> dict[str, Any]:
    """Both, for scripts."""
    predicted = None if hand.predicted is None else hand.predicted.model_dump()
    table = {**asdict(hand), "predicted": predicted}
    return {"plan": plan.model_dump(), "tp_plan": table}


def side_by_side(plan: Plan, hand: HandWritten) -> RenderableType:
    """Bytes, collectives and time of both, and what the hand-written one leaves whole."""
    parts: list[RenderableType] = [_figures(plan.predicted, hand)]
    if hand.problem is not None:
        parts += [Text(""), Text(f"The tp_plan has no price: {hand.problem}", style="yellow")]
    if hand.unused:
        parts += [Text(""), Text(f"Rules that fit nothing in the model: {', '.join(hand.unused)}")]
    return Group(*parts, Text(""), _replicated(plan, hand))


def _figures(ours: Prediction, hand: HandWritten) -> RenderableType:
    rules = f"TP_PLAN ({hand.rules} rule{'s' * (hand.rules != 1)})"
    table = Table(
        Column(""), Column("SHARDWRIGHT", justify="right"), Column(rules, justify="right"),
        box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    mine, theirs = _rows(ours), _rows(hand.predicted)
    for row in dict.fromkeys((*mine, *theirs)):
        none = "none" if row in mine or hand.predicted else "?"
        table.add_row(row, mine.get(row, "none"), theirs.get(row, none if hand.predicted else "?"))
    return table


def _rows(predicted: Prediction | None) -> dict[str, str]:
    if predicted is None:
        return {}
    held = max(predicted.parameter_bytes)
    share = f"{held / max(predicted.unsharded_bytes, 1):.1%}"
    out = {
        "memory a rank": f"{human_bytes(held)}, {share}",
        "predicted time": human_time(predicted.time_ns),
    }
    for c in predicted.collectives:
        kind = f"{c.phase} {c.kind.replace('_', '-')}"
        out[kind] = f"{c.count} ({human_bytes(c.bytes)})"
    return dict(sorted(out.items(), key=lambda item: item[0].startswith("backward")))


def _replicated(plan: Plan, hand: HandWritten) -> RenderableType:
    total = plan.predicted.unsharded_bytes
    large = {name: n for name, n in hand.replicated.items() if n >= LARGE * total}
    rest = sum(hand.replicated.values()) - sum(large.values())
    small = f"{human_bytes(rest)} in parameters of less than {LARGE:.0%} each"
    if not large:
        return Text(f"The tp_plan leaves nothing large replicated: {small}.")
    table = Table(
        Column("LEFT_WHOLE_BY_TP_PLAN", overflow="fold", max_width=54),
        Column("BYTES", justify="right", no_wrap=True),
        Column("SHARDWRIGHT", overflow="fold"),
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    for name, size in large.items():
        owner, _, key = name.rpartition(".")
        spec = plan.module(owner)
        entry = spec.parameters.get(key) if spec else None
        words = placement_in_words(spec.layer, entry) if spec and entry else "replicated"
        table.add_row(name, human_bytes(size), words)
    return Group(table, Text(f"and {small}"))
