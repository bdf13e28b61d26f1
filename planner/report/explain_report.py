"""Formats explanations as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.planner.contract.names import pattern
from shardwright.planner.report import tables
from shardwright.planner.report.explain import Alternative, Explanation, Link
from shardwright.planner.units import human_bytes, human_time

LONG = 8
"""Longer chains show only their first and last ops."""


def explain_report(found: list[Explanation]) -> RenderableType:
    """Show each group of parameters with its alternatives."""
    return tables.spaced([*map(_one, found)])


def _one(one: Explanation) -> RenderableType:
    shape = "x".join(map(str, one.shape)) + (f", {one.count} times" if one.count > 1 else "")
    title = Text.assemble((one.name, "bold"), f" ({shape})")
    grid = tables.facts()
    grid.add_row("  placed", one.placement)
    if one.stored:
        grid.add_row("  held", one.stored)
    if because := _because(one):
        grid.add_row("  because", because)
    if one.together:
        lines: list[RenderableType] = []
        for other in one.together:
            lines += [Text(other), Padding(chain_in_words(one.ties[other]), (0, 0, 0, 2))]
        grid.add_row("  same axis", Group(*lines))
    rows: list[RenderableType] = [title, grid]
    priced = [a for a in one.alternatives if a.priced]
    if priced:
        rows.append(Padding(_prices(priced), (0, 0, 0, 2)))
    rows += [_obstacles(a) for a in one.alternatives if not a.priced]
    return Group(*rows)


def _because(one: Explanation) -> str | None:
    """Say why the plan places it there; None if the plan alone does not say."""
    if one.pinned:
        return f"a pin asks for it: {one.pinned}"
    if not one.alternatives:
        return one.replicated
    if all(a.impossible for a in one.alternatives):
        return "nothing else is possible"
    return _convention(one) if one.convention else f"it is the cheapest: {one.objective}"


def chain_in_words(chain: Sequence[Link]) -> str:
    """List a chain's ops that compute something, with the module wherever that changes."""
    chain = [link for link in chain if not link.moves]
    modules = [pattern(link.module) for link in chain]
    around = _block(modules)
    words = [
        link.op if module == before else f"{link.op} ({module.removeprefix(around) or 'the model'})"
        for link, module, before in zip(chain, modules, [None, *modules], strict=False)
    ]
    if len(words) > LONG:
        words[LONG // 2 : -LONG // 2] = [f"... {len(words) - LONG + 1} more ..."]
    return f"by {' > '.join(words)}"


def _block(modules: Sequence[str]) -> str:
    """Return the common prefix of module names, up to the number of a block."""
    stem, star, _ = commonprefix([f"{module}." for module in modules]).rpartition("*.")
    return stem + star


def _convention(one: Explanation) -> str:
    """Name the convention that settled the placement, and what it costs."""
    text = "by convention token tables and heads are sharded by rows"
    found = [a for a in one.alternatives if a.priced and a.bytes <= 0 and a.time_ns < 0]
    if not found:
        return text
    best = min(found, key=lambda a: a.time_ns)
    return (
        f"{text}; {best.placement} would take {human_time(-best.time_ns)} less: "
        f"--pin '{one.name}={best.placement}'"
    )


def _prices(priced: list[Alternative]) -> Table:
    table = tables.table(
        tables.name("ALTERNATIVE"), tables.number("BYTES_PER_RANK"), tables.number("TIME"),
        tables.number("COLLECTIVES"),
    )  # fmt: skip
    for a in priced:
        table.add_row(
            a.placement, signed(a.bytes, human_bytes), signed(a.time_ns, human_time),
            signed(a.collectives, str),
        )  # fmt: skip
    return table


def signed(difference: int, words: Callable[[int], str]) -> str:
    """Format a difference with its sign; `=` if it is zero."""
    if not difference:
        return "="
    return f"{'+' if difference > 0 else '-'}{words(abs(difference))}"


def _obstacles(a: Alternative) -> RenderableType:
    why = " is impossible, because of" if a.impossible else ": not solved in time"
    text = Text.assemble((a.placement, "yellow"), why)
    lines = [Text(f"- {reason}") for reason in a.impossible]
    return Padding(Group(text, *lines), (0, 0, 0, 2))
