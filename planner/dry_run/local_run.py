"""A dry run as one rank: apply a plan on meta, run the model's own code, compare every shape.

The planner reasons about a traced graph, the runtime runs the module's Python code. Whatever the
trace did not show (a number that should have been local, an attribute nobody saw) comes out here as
a wrong shape or an exception, and becomes a constraint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.like_blocks import LikeBlocks
from shardwright.planner.trace.boundaries import map_slots
from shardwright.planner.trace.calls import Calls, difference
from shardwright.planner.trace.duplicate import duplicated
from shardwright.planner.trace.on_fake import follow, run_and_note
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.traced_calls import Run
from shardwright.runtime.api import apply_modules
from shardwright.runtime.mesh import Mesh


@dataclass(frozen=True)
class Mismatch:
    """A module whose local forward is not what the plan says."""

    module: str
    text: str


def run_local(
    root: nn.Module,
    runs: Sequence[Run],
    plan: Plan,
    coords: Coords,
    predicted: Mapping[tuple[str, str], list[tuple[int, ...]]],
    opaque: Opaque,
    whole_calls: Calls | None,
    blocks: LikeBlocks,
) -> Mismatch | None:
    """Apply `plan` to a copy of `root` without a process group, make `runs`, compare shapes.

    With `whole_calls`, compare what its code calls as well. Of `blocks`, like ones run once.
    """
    with duplicated(root) as local:
        return _run(local, runs, plan, coords, predicted, opaque, whole_calls, blocks)


def _run(
    local: nn.Module,
    runs: Sequence[Run],
    plan: Plan,
    coords: Coords,
    predicted: Mapping[tuple[str, str], list[tuple[int, ...]]],
    opaque: Opaque,
    whole_calls: Calls | None,
    blocks: LikeBlocks,
) -> Mismatch | None:
    """`run_local` on a copy."""
    calls = [c.model_copy(update={"training": True}) for c in plan.calls]
    plan = plan.model_copy(update={"calls": calls})  # whatever else ranks draw random numbers for
    try:
        apply_modules(local, plan, Mesh.shape_only(coords), defer=False)  # as it was traced
    except PlanError as error:
        return Mismatch("", str(error))
    times: dict[tuple[str, str], int] = {}
    found: list[Mismatch] = []

    def leave(name: str, output: Any) -> None:
        def compare(x: torch.Tensor, slot: str) -> torch.Tensor:
            k = times.get((name, slot), 0)
            times[(name, slot)] = k + 1
            want = predicted.get((name, slot), [])
            if k < len(want) and tuple(x.shape) != want[k]:
                text = f"output '{slot}' has shape {list(x.shape)}, not {list(want[k])}"
                found.append(Mismatch(name, text))
            return x

        map_slots(output, "", compare)

    blocks.put_in(local)
    entered = follow(local, leave)
    try:
        noted = run_and_note(local, runs, entered, opaque)
        if whole_calls is not None and (other := difference(whole_calls, noted)) is not None:
            found.append(Mismatch(*other))
    except Exception as error:  # whatever model code raises on sizes it does not expect
        text = str(error).strip().split("\n")[0]
        found.append(Mismatch(entered[-1] if entered else "", f"{type(error).__name__}: {text}"))
    return found[0] if found else None
