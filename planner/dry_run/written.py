"""Does a plan still hold for a model? Run its local forward on meta, first and last rank.

The unsplit model is run first, and every output that the plan speaks of is predicted from it: the
model's own outputs are replicated on each rank, and an output that is redistributed has the layout
that this leads to. What other modules give out is not written in a plan, so it is not compared; a
wrong size in there makes the forward fail, or shows in the outputs that are.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwright.errors import ModelError, PlanError
from shardwright.planner.contract.dims import dim_size, resolve
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.local_run import run_local
from shardwright.planner.trace.boundaries import map_slots
from shardwright.planner.trace.on_fake import calls_of, follow, run_on_fake
from shardwright.planner.trace.one_at_a_time import apart
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.source import Source, read_source
from shardwright.runtime.identity import check_identity

Shapes = dict[tuple[str, str], list[tuple[int, ...]]]
"""(module, slot of its output) -> shape at each call."""


@dataclass(frozen=True)
class Compared:
    """What was run: on which ranks, and how many output shapes were compared on each."""

    ranks: tuple[int, ...]
    shapes: int


@apart
def dry_run_written(plan: Plan, model: Any) -> Compared:
    """Compare `plan` with `model` (as `shardwright.plan` takes it); nothing is allocated.

    Raises:
        ModelError: the model cannot be read.
        PlanError: the plan is for another model, or does not hold; says where.
    """
    source = read_source(model, dtype=getattr(torch, plan.workload.dtype, None))
    if plan.workload.sequence_parallel:  # it was not made for others
        source = source.along_sequence()
    source = source.of(plan.calls)
    check_identity(source.module, plan)
    opaque = Opaque(source.module)
    whole = output_shapes(source, opaque)
    compared = 0
    corners = list(_corners(plan))
    calls = calls_of(source.module, source.runs, opaque)
    alone = {run.module for run in source.runs}
    for rank, coords in corners:
        predicted = predict(plan, whole, coords, alone)
        compared = sum(map(len, predicted.values()))
        wrong = run_local(source.module, source.runs, plan, coords, predicted, opaque, calls)
        if wrong is not None:
            where = f" in '{wrong.module}'" if wrong.module else ""
            raise PlanError(
                f"the plan does not hold on rank {rank}{where}: {wrong.text}; "
                "make it again with `shardwright plan`"
            )
    return Compared(tuple(rank for rank, _ in corners), compared)


def _corners(plan: Plan) -> Iterator[tuple[int, Coords]]:
    """The first and the last rank, with where they stand on each mesh dim."""
    for rank in sorted({0, plan.world_size - 1}):
        yield rank, plan.coords(rank)


def predict(plan: Plan, whole: Shapes, coords: Coords, alone: Collection[str] = ("",)) -> Shapes:
    """Local shapes of the outputs that the plan speaks of, from the whole ones.

    Modules that run `alone` give whole ones.

    Raises:
        PlanError: a redistribution does not fit the tensor that it is for.
    """
    out: Shapes = {key: shapes for key, shapes in whole.items() if key[0] in alone}
    for (name, slot), shapes in whole.items():
        spec = plan.module(name)
        spoken = spec.outputs if spec and name not in alone else []
        targets = [c.target for c in spoken if c.slot == slot]
        for shape in shapes if targets else ():
            fitting = [d for t in targets if len(d := parse(t).dims) == len(shape)]
            if not fitting:
                raise PlanError(
                    f"the plan lays output '{slot}' of '{name}' out as '{targets[0]}', "
                    f"but its shape is {list(shape)}"
                )
            resolved = [resolve(d, n) for d, n in zip(fitting[0], shape, strict=True)]
            local = tuple(dim_size(d, coords) or 0 for d in resolved)
            out.setdefault((name, slot), []).append(local)
    return out


def output_shapes(source: Source, opaque: Opaque) -> Shapes:
    """Shapes of all that every module of the unsplit model gives out.

    Modules that branch on data are put into `opaque`.

    Raises:
        ModelError: the model does not run on meta.
    """
    while True:
        module, found = copy.deepcopy(source.module), Shapes()
        entered = follow(module, partial(_note, found))
        try:
            run_on_fake(module, source.runs, opaque)
            return found
        except Exception as error:  # whatever model code raises
            if opaque.after(error, entered):
                continue
            raise ModelError(f"the unsplit model fails on meta: {_first_line(error)}") from error


def _note(found: Shapes, name: str, output: Any) -> None:
    def note(x: torch.Tensor, slot: str) -> torch.Tensor:
        found.setdefault((name, slot), []).append(tuple(x.shape))
        return x

    map_slots(output, "", note)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
