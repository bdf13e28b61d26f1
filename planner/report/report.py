"""Formats a plan as tables for people, from the plan only; used by `plan` and `show`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.planner.contract.mesh import CP, Coords
from shardwright.planner.contract.names import grouped, pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import (
    ModulePlan,
    ParameterPlan,
    Plan,
    Redistribution,
    Replicated,
)
from shardwright.planner.report import tables
from shardwright.planner.report.fit import memory_limit, memory_of, misfit
from shardwright.planner.report.mesh_table import launch_line, mesh_table
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import (
    collectives_in_words,
    kind_in_words,
    memory_in_words,
    mesh_in_words,
    objective_in_words,
    placement_in_words,
    ranges,
    solver_in_words,
    workload_in_words,
)

Row = tuple[str, str, str, str, str]
"""Name, shape, local shape, placement, collectives."""


def report(plan: Plan) -> RenderableType:
    """Return everything that a plan says, for rich to print."""
    parts = [_summary(plan), *([mesh_table(plan)] if plan.meshes else []), _split(plan)]
    if any(spec.attributes or spec.sizes for spec in plan.modules.values()):
        parts.append(_local_numbers(plan))
    parts.append(replicated_table(plan.replicated))
    if plan.opaque:
        ops = ", ".join(f"{op} ({n})" if n > 1 else op for op, n in plan.opaque.items())
        parts.append(Text(f"Ops without a rule, kept replicated: {ops}", style="yellow"))
    return tables.spaced(parts)


def _summary(plan: Plan) -> RenderableType:
    title = Text.assemble((plan.model.architecture, "bold"), f" {mesh_in_words(plan)}")
    grid, load, predicted = tables.facts(), plan.workload, plan.predicted
    sizes, unsharded = predicted.parameter_bytes, max(predicted.unsharded_bytes, 1)
    per = "on the fullest rank" if len(set(sizes)) > 1 else "per rank"
    share = f"{max(sizes) / unsharded:.1%} of {human_bytes(predicted.unsharded_bytes)}"
    found: list[tuple[str, str | Text]] = [
        ("memory", f"{human_bytes(max(sizes))} {per}, {share} (parameters and buffers)")
    ]
    held = memory_of(plan)
    if held.total > held.parameters:
        found.append(("in use", f"{human_bytes(held.total)}: {memory_in_words(held)}"))
    if predicted.memory_by_rank:
        found.append(("by rank", _by_rank(plan)))
    if text := misfit(plan):
        limit = human_bytes(memory_limit(plan) or 0)
        found.append(("", Text(f"DOES NOT FIT the {limit} of a rank", style="bold red")))
    found += [(phase, human_time(time)) for phase, time in predicted.phase_ns.items()]
    found += [(phase, _traffic(plan, phase)) for phase in ("forward", "backward")]
    if len(load.phases) > 1 and "decode" in load.phases:
        found.append(("decode step", _traffic(plan, "decode")))
    found.append(("priced for", workload_in_words(load)))
    found.append(("objective", objective_in_words(plan.objective)))
    if load.dp == "fsdp":
        found.append(("copies", f"{load.replicas} share out {', '.join(plan.fsdp) or 'nothing'}"))
    if load.recomputed:
        blocks = (f"{n} of {path}" for path, n in load.recomputed.items())
        found.append(("recompute", f"{', '.join(blocks)}, in the backward pass"))
    if load.sequence_parallel:
        found.append(("sequence", "hidden states between blocks are sharded along it"))
    if (cp := plan.mesh.get(CP, 1)) > 1:
        found.append(("sequence", f"sharded over {cp} ranks (cp)"))
    if plan.pins:
        found.append(("pins", "\n".join(f"{name}={p}" for name, p in plan.pins.items())))
    if plan.meshes:
        found.append(("launch", launch_line(plan)))
    if plan.trials:
        found.append(("timed", _timed(plan)))
    solver = solver_in_words(plan.solver)
    found.append(("solver", f"for least memory: {solver}" if text else solver))
    if plan.solver.note:
        found.append(("note", plan.solver.note))
    for what, value in found:
        grid.add_row(f"  {what}", Text(value) if isinstance(value, str) else value)
    return Group(title, grid)


def _timed(plan: Plan) -> str:
    """Return what came of timing other plans beside the one that the planner chose."""
    best = plan.trials[0]
    tried = f"{len(plan.trials)} other plans ran on ranks in turn with the planner's choice"
    if (best.mesh, best.pins) == (plan.mesh, plan.pins):
        return f"{tried}; this one was the fastest, with {best.share:.2f} times its time"
    return f"{tried}, which was kept; the fastest other took {best.share:.2f} times its time"


def _by_rank(plan: Plan) -> str:
    """Return what each rank of tp holds, of what it may."""
    held, limits = plan.predicted.memory_by_rank, plan.workload.memories
    of = [f" of {human_bytes(limit)}" for limit in limits] or [""] * len(held)
    return ", ".join(f"{human_bytes(n)}{most}" for n, most in zip(held, of, strict=True))


def _traffic(plan: Plan, phase: str) -> str:
    found = [c for c in plan.predicted.collectives if c.phase == phase]
    if not found:
        return "no collectives"
    kinds = [f"{c.count} {kind_in_words(c)} ({human_bytes(c.bytes)})" for c in found]
    total = f"{sum(c.count for c in found)} collectives: " if len(found) > 1 else ""
    return total + ", ".join(kinds)


def _split(plan: Plan) -> RenderableType:
    """Show what is sharded and how: one row per parameter, by layer, with equal layers joined."""
    if not plan.modules:
        return Text("Nothing is sharded.")
    table = tables.table(
        tables.name("PARAMETER"), tables.number("SHAPE"), tables.number("ON_RANK_0"),
        tables.words("SHARDING"), tables.name("COLLECTIVE"),
    )  # fmt: skip
    table.columns[-1].style = "yellow"
    groups: dict[str, list[Row]] = {}
    for group, name, spec in _ordered(plan):
        inside = "(the layer)" if group and name == group else name.removeprefix(f"{group}.")
        groups.setdefault(group, []).extend(_rows(plan, inside, spec))
    for title, rows in _equal_layers(groups):
        if title and rows:
            table.add_row(Text(title, style="bold cyan"))
        for row in rows:
            table.add_row(f"  {row[0]}" if title else row[0], *row[1:])
    return table


def _equal_layers(groups: dict[str, list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    """Yield groups with titles; layers of a stack with equal rows are one: `layers.3-60 (58)`."""
    alike = grouped(((pattern(group), tuple(rows)), group) for group, rows in groups.items())
    for (name, rows), members in alike.items():
        title = members[0]
        if len(members) > 1:
            numbers = ranges(int(m.rpartition(".")[2]) for m in members)
            title = f"{name.removesuffix('*')}{numbers} ({len(members)} layers)"
        yield title, [*rows]


def _rows(plan: Plan, name: str, spec: ModulePlan) -> Iterator[Row]:
    here = plan.coords(0)
    boundary = collectives_in_words(spec.boundary, here)
    if not spec.parameters and boundary:
        yield name, "", "", "", boundary
    ordered = sorted(spec.parameters.items(), key=lambda item: (item[0] != "weight", item[0]))
    for key, entry in ordered:
        placement = parse(entry.placement)
        text = "\n".join(t for t in (boundary, _summed(entry, here)) if t)
        words = placement_in_words(spec.layer, entry)
        local = _shape(placement.local_shape(here))
        yield f"{name}.{key}".lstrip("."), _shape(placement.shape), local, words, text
        boundary = ""


def _summed(entry: ParameterPlan, coords: Coords) -> str:
    if entry.use is None:
        return ""
    change = Redistribution(slot="", source=entry.placement, target=entry.use)
    return collectives_in_words([change], coords)


def _shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("?" if n is None else str(n) for n in shape)


def _ordered(plan: Plan) -> list[tuple[str, str, ModulePlan]]:
    """Return (layer of a stack or "", module, its plan), modules outside of stacks first."""
    found = [(_layer(name), name, spec) for name, spec in plan.modules.items()]
    return sorted(found, key=lambda item: (_natural(item[0]), _natural(item[1])))


def _layer(name: str) -> str:
    found = re.match(r"(?:[^.]+\.)*?(?:\*|\d+)(?=\.|$)", name)
    return found[0] if found else ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (0, p) for p in name.split(".")] if name else []


def _local_numbers(plan: Plan) -> RenderableType:
    """Show the integers in the model's code that a rank replaces by local ones."""
    table = tables.table(
        tables.name("MODULE"), tables.name("LOCAL_NUMBER"), tables.number("UNSHARDED"),
        tables.number("ON_RANK_0"), tables.words("AS"),
    )  # fmt: skip
    here = plan.coords(0)
    alike: dict[tuple[str, ...], list[str]] = {}
    for _, name, spec in _ordered(plan):
        for key, text in sorted((spec.attributes | spec.sizes).items()):
            dims = parse(text)
            row = (pattern(name), key, _shape(dims.shape), _shape(dims.local_shape(here)), text)
            alike.setdefault(row, []).append(name)
    for (module, *row), names in alike.items():
        table.add_row(_counted(module, names), *row)
    return table


def replicated_table(found: Sequence[Replicated]) -> RenderableType:
    """Show large parameters that every rank holds, each with its reason."""
    if not found:
        return Text("No large parameter stays replicated.")
    table = tables.table(
        tables.name("LARGE_AND_REPLICATED"), tables.number("BYTES"), tables.words("REASON")
    )
    alike = grouped(((pattern(e.parameter), e.bytes, e.reason), e.parameter) for e in found)
    before = ""
    for (group, size, reason), names in alike.items():
        many = f"{len(names)} x " if len(names) > 1 else ""
        table.add_row(
            group if many else names[0], many + human_bytes(size), tables.once(reason, before)
        )
        before = reason
    return table


def _counted(group: str, names: list[str]) -> str:
    return f"{group} ({len(names)} x)" if len(names) > 1 else names[0]
