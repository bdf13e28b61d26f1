"""Exports a plan as a table of the model's parameters, for a spreadsheet or a document."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Plan, Redistribution
from shardwright.planner.wording import collectives_in_words, placement_in_words


class Row(NamedTuple):
    """A parameter or a buffer, or a module without parameters that has collectives.

    `*` stands for every layer number that has no separate row.
    """

    name: str
    shape: str = ""
    placement: str = ""
    """The placement in layout notation."""

    split: str = ""
    """The placement in words."""

    elements: int | str = ""
    elements_on_fullest_rank: int | str = ""
    module_collectives: str = ""
    """Collectives at the boundary of the parameter's module, and to use the parameter."""


def rows(plan: Plan) -> list[Row]:
    """List parameters, buffers that the plan names, and modules with collectives, by name."""
    named = [f"{n}.{k}".lstrip(".") for n, spec in plan.modules.items() for k in spec.parameters]
    found = [
        Row(name, module_collectives=sent)
        for name, spec in plan.modules.items()
        if not spec.parameters and (sent := _sent(plan, spec.boundary))
    ]
    found += [_row(plan, name) for name in {*plan.model.parameters, *named}]
    return sorted(found, key=lambda row: row.name)


def _row(plan: Plan, name: str) -> Row:
    entry, spec = plan.parameter(name), plan.module(name.rpartition(".")[0])
    if spec is None or entry is None:
        whole = ", ".join(map(str, plan.model.parameters[name]))
        spec, entry = ModulePlan(), ParameterPlan(placement=whole)
    placement, use = parse(entry.placement), entry.use or entry.placement
    local = (placement.local_shape(plan.coords(rank)) for rank in range(plan.world_size))
    own = Redistribution(slot="", source=entry.placement, target=use)
    return Row(
        name,
        shape="x".join(str(n) for n in placement.shape),
        placement=entry.placement,
        split=placement_in_words(spec.layer, entry),
        elements=_elements(placement.shape),
        elements_on_fullest_rank=max(map(_elements, local)),
        module_collectives=_sent(plan, [*spec.boundary, own]),
    )


def _elements(shape: Sequence[int | None]) -> int:
    return prod(n or 0 for n in shape)


def _sent(plan: Plan, changes: Sequence[Redistribution]) -> str:
    return collectives_in_words(changes, plan.coords(0)).replace("\n", ", ")


def as_csv(plan: Plan) -> str:
    """Write comma-separated values with a header."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(Row._fields)
    table.writerows(rows(plan))
    return out.getvalue()


def as_markdown(plan: Plan) -> str:
    """Write a Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"

    table = "".join(map(line, rows(plan)))
    return (
        line([f.replace("_", " ") for f in Row._fields]) + line(["---"] * len(Row._fields)) + table
    )
