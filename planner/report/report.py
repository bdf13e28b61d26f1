"""A plan as tables for people, from the plan alone: what `plan` prints is what `show` prints."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from shardwright.planner.contract.mesh import CP, Coords
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Plan, Redistribution
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import (
    collectives_in_words,
    memory_in_words,
    objective_in_words,
    placement_in_words,
    solver_in_words,
)

WIDTH = 100
LONG = 40


def print_report(plan: Plan) -> None:
    """Print the report on stdout, with colours if that is a terminal and NO_COLOR is not set."""
    show(report(plan))


def show(part: RenderableType) -> None:
    """Print on stdout: with colours on a terminal, else as plain text of at most 100 columns."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.width = min(console.width, WIDTH)
        console.print(part)
    else:
        console.file.write(plain(part))


def to_text(plan: Plan) -> str:
    """The report as plain text of at most 100 columns."""
    return plain(report(plan))


def plain(part: RenderableType) -> str:
    """The same without colours, at most 100 columns wide, no blanks at the ends of lines."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False, color_system=None).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def report(plan: Plan) -> RenderableType:
    """Everything that a plan says, as something that rich can print."""
    parts = [_summary(plan), _split(plan)]
    if any(spec.attributes or spec.sizes for spec in plan.modules.values()):
        parts.append(_attributes(plan))
    parts.append(_wholes(plan))
    if plan.opaque:
        ops = ", ".join(f"{op} ({n})" if n > 1 else op for op, n in plan.opaque.items())
        parts.append(Text(f"Ops without a rule, kept replicated: {ops}", style="yellow"))
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part, Text("")]
    return Group(*spaced[:-1])


def _summary(plan: Plan) -> RenderableType:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    title = Text.assemble((plan.model.architecture, "bold"), f" on {ranks} ({mesh})")
    grid = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    sizes, whole = plan.predicted.parameter_bytes, plan.predicted.unsharded_bytes
    held = human_bytes(max(sizes)) + (" on the fullest rank" if len(set(sizes)) > 1 else " a rank")
    share = f"{max(sizes) / max(whole, 1):.1%} of {human_bytes(whole)}"
    grid.add_row("  memory", f"{held}, {share} (parameters and buffers)")
    held = plan.predicted.memory
    if held is not None and held.total > held.parameters:
        grid.add_row("  in use", f"{memory_in_words(held)}: in all {human_bytes(held.total)}")
    for phase, time in plan.predicted.phase_ns.items():
        grid.add_row(f"  {phase}", human_time(time))
    grid.add_row("  forward", _traffic(plan, "forward"))
    grid.add_row("  backward", _traffic(plan, "backward"))
    load = plan.workload
    if len(load.phases) > 1 and "decode" in load.phases:
        grid.add_row("  decode step", _traffic(plan, "decode"))
    phases = ", ".join(f"{n} {phase}" if n > 1 else phase for phase, n in load.phases.items())
    grid.add_row(
        "  priced for",
        f"{phases}, batch {load.batch}, seq {load.seq}, {load.dtype} on {load.device}",
    )
    grid.add_row("  objective", objective_in_words(plan.objective))
    if load.dp == "fsdp":
        grid.add_row("  copies", f"{load.replicas} share out parameters (fully_shard)")
    if load.sequence_parallel:
        grid.add_row("  sequence", "hidden states between blocks are sharded along it")
    if (cp := plan.mesh.get(CP, 1)) > 1:
        grid.add_row("  sequence", f"shared by {cp} ranks (cp)")
    if plan.pins:
        grid.add_row("  pins", "\n".join(f"{name}={p}" for name, p in plan.pins.items()))
    grid.add_row("  solver", solver_in_words(plan.solver))
    if plan.solver.note:
        grid.add_row("  note", plan.solver.note)
    return Group(title, grid)


def _traffic(plan: Plan, phase: str) -> str:
    found = [c for c in plan.predicted.collectives if c.phase == phase]
    if not found:
        return "no collectives"
    kinds = [f"{c.count} {c.kind.replace('_', '-')} ({human_bytes(c.bytes)})" for c in found]
    total = f"{sum(c.count for c in found)} collectives: " if len(found) > 1 else ""
    return total + ", ".join(kinds)


def _table(*columns: Column) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _split(plan: Plan) -> RenderableType:
    """What is split how, one row a parameter, grouped by repeated layer."""
    if not plan.modules:
        return Text("Nothing is sharded.")
    table = _table(
        Column("PARAMETER", overflow="fold", max_width=54),
        Column("SHAPE", justify="right", no_wrap=True),
        Column("ON_RANK_0", justify="right", no_wrap=True),
        Column("SHARDING", overflow="fold"),
        Column("COLLECTIVE", style="yellow", no_wrap=True),
    )
    title = None
    for group, name, spec in _ordered(plan):
        rows = list(_rows(plan, name, spec))
        if rows and group != title and group:
            table.add_row(Text(group, style="bold cyan"))
            title = group
        for row in rows:
            short = row[0].removeprefix(f"{group}.")
            table.add_row(f"  {short}" if group else short, *row[1:])
    return table


def _rows(plan: Plan, name: str, spec: ModulePlan) -> Iterator[tuple[str, str, str, str, str]]:
    here = plan.coords(0)
    boundary = collectives_in_words(spec.boundary, here)
    if not spec.parameters and boundary:
        yield name, "", "", "", boundary
    ordered = sorted(spec.parameters.items(), key=lambda item: (item[0] != "weight", item[0]))
    for key, entry in ordered:
        placement = parse(entry.placement)
        text = "\n".join(t for t in (boundary, _summed(entry, here)) if t)
        full = f"{name}.{key}" if name else key
        words = placement_in_words(spec.layer, entry)
        yield full, _shape(placement.shape), _shape(placement.local_shape(here)), words, text
        boundary = ""


def _summed(entry: ParameterPlan, coords: Coords) -> str:
    if entry.use is None:
        return ""
    change = Redistribution(slot="", source=entry.placement, target=entry.use)
    return collectives_in_words([change], coords)


def _shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("?" if n is None else str(n) for n in shape)


def _ordered(plan: Plan) -> list[tuple[str, str, ModulePlan]]:
    """(repeated layer or "", module name, its plan), what is in no layer first."""
    found = [(_group(name), name, spec) for name, spec in plan.modules.items()]
    return sorted(found, key=lambda item: (_natural(item[0]), _natural(item[1])))


def _group(name: str) -> str:
    found = re.match(r"(?:[^.]+\.)*?(?:\*|\d+)(?=\.|$)", name)
    return found[0] if found else ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (0, p) for p in name.split(".")] if name else []


def _attributes(plan: Plan) -> RenderableType:
    table = _table(
        Column("MODULE", overflow="fold"),
        Column("LOCAL_NUMBER", overflow="fold"),
        Column("REPLICATED", justify="right"),
        Column("ON_RANK_0", justify="right"),
        Column("AS", overflow="fold"),
    )
    here = plan.coords(0)
    for _, name, spec in _ordered(plan):
        for key, text in sorted((spec.attributes | spec.sizes).items()):
            dims = parse(text)
            table.add_row(name, key, _shape(dims.shape), _shape(dims.local_shape(here)), text)
    return table


def _wholes(plan: Plan) -> RenderableType:
    """Large parameters that every rank holds, each with its reason."""
    if not plan.replicated:
        return Text("No large parameter stays replicated.")
    table = _table(
        Column("LARGE_AND_WHOLE", overflow="fold", max_width=48),
        Column("BYTES", justify="right", no_wrap=True),
        Column("REASON", overflow="fold"),
    )
    alike: dict[tuple[str, int, str], list[str]] = {}
    for entry in plan.replicated:
        key = pattern(entry.parameter), entry.bytes, entry.reason
        alike.setdefault(key, []).append(entry.parameter)
    before = ""
    for (group, size, reason), names in alike.items():
        many = f"{len(names)} x " if len(names) > 1 else ""
        name = group if many else names[0]
        table.add_row(name, many + human_bytes(size), once(reason, before))
        before = reason
    return table


def once(text: str, before: str) -> str:
    """What a cell says below one that says `before`: what is long is not said again."""
    return "the same" if text == before and len(text) > LONG else text
