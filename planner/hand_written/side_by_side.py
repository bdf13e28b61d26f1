"""Compares a plan with transformers' own plan, as a table for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.hand_written.price import HandWritten
from shardwright.planner.report import tables
from shardwright.planner.units import human_bytes
from shardwright.planner.wording import costs_in_words, parameter_in_words

LARGE = 0.01
"""Replicated parameters are listed if they have at least this share of all bytes."""


def both_as_json(plan: Plan, hand: HandWritten) -> dict[str, Any]:
    """Return both plans, for scripts."""
    predicted = None if hand.predicted is None else hand.predicted.model_dump()
    return {"plan": plan.model_dump(), "tp_plan": {**asdict(hand), "predicted": predicted}}


def side_by_side(plan: Plan, hand: HandWritten) -> RenderableType:
    """Show bytes, collectives and time of both, and what transformers' plan replicates."""
    rules = f"TP_PLAN ({hand.rules} rule{'s' * (hand.rules != 1)})"
    table = tables.table(tables.name(""), tables.number("SHARDWRIGHT"), tables.number(rules))
    ours = costs_in_words(plan.predicted)
    theirs = costs_in_words(hand.predicted) if hand.predicted else {}
    for row in {**ours, **theirs}:
        table.add_row(row, ours.get(row, "none"), theirs.get(row, "none" if theirs else "?"))
    parts: list[RenderableType] = [table]
    if hand.problem is not None:
        parts.append(Text(f"\nThe tp_plan cannot be priced: {hand.problem}", style="yellow"))
    if hand.unused:
        parts.append(Text(f"\nRules that match nothing in the model: {', '.join(hand.unused)}"))
    return Group(*parts, Text(""), _replicated(plan, hand))


def _replicated(plan: Plan, hand: HandWritten) -> RenderableType:
    total = plan.predicted.unsharded_bytes
    large = {name: n for name, n in hand.replicated.items() if n >= LARGE * total}
    rest = sum(hand.replicated.values()) - sum(large.values())
    small = f"{human_bytes(rest)} in parameters of less than {LARGE:.0%} each"
    if not large:
        return Text(f"The tp_plan leaves nothing large replicated: {small}.")
    table = tables.table(
        tables.name("REPLICATED_BY_TP_PLAN"), tables.number("BYTES"), tables.words("SHARDWRIGHT")
    )
    for name, size in large.items():
        table.add_row(name, human_bytes(size), parameter_in_words(plan, name))
    return Group(table, Text(f"and {small}"))
