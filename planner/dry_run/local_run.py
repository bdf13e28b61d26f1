"""A dry run as one rank: applies a plan on meta, runs the model's own code, compares every shape.

The planner works on a traced graph; the runtime runs the modules' Python code. Anything that the
trace did not show (a number that should have been local, an attribute) appears here as a wrong
shape or an exception, and becomes a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.errors import PlanError, in_one_line
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.block_dedup import DeduplicatedBlocks
from shardwright.planner.trace.data_queries.model_code import place_of
from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.call_log import Calls, Repeats, difference
from shardwright.planner.trace.trial.fake_tensor_bridge import follow, run_and_note
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.apply_modules import apply_modules
from shardwright.runtime.slots import map_slots


@dataclass(frozen=True)
class Mismatch:
    """A module whose local forward differs from the plan, and how."""

    module: str
    text: str


def run_local(
    root: nn.Module,
    runs: Sequence[Run],
    plan: Plan,
    coords: Coords,
    predicted: Mapping[tuple[str, str], list[tuple[int, ...]]],
    opaque: Opaque,
    repeats: Repeats,
    unsharded_calls: Calls | None,
    blocks: DeduplicatedBlocks,
) -> Mismatch | None:
    """Apply `plan` to a copy of `root` without a process group, make `runs`, compare shapes.

    With `unsharded_calls`, the calls of the code and the `repeats` are compared too. Equal calls of
    `blocks` run once. Returns the first mismatch, or None.
    """
    training = [c.model_copy(update={"training": True}) for c in plan.calls]
    drawing = plan.model_copy(update={"calls": training})  # runs may train, whatever they draw
    found: list[Mismatch] = []
    with duplicated(root, blocks.hollow) as local:
        try:
            apply_modules(local, drawing, Mesh.shape_only(coords), defer=False)  # as in the trace
        except PlanError as error:
            return Mismatch("", str(error))
        blocks.put_in(local)
        entered = follow(local, _comparing(predicted, found))
        try:
            with blocks.hollow.guarded(entered):
                noted = run_and_note(local, runs, entered, opaque)
            other = None if unsharded_calls is None else difference(unsharded_calls, noted, repeats)
            if other is not None:
                found.append(Mismatch(*other))
        except Exception as error:  # model code may raise anything on unexpected sizes
            text = in_one_line(error) + place_of(error)
            found.append(Mismatch(entered[-1] if entered else "", text))
    return found[0] if found else None


def _comparing(
    predicted: Mapping[tuple[str, str], list[tuple[int, ...]]], found: list[Mismatch]
) -> Callable[[str, Any], None]:
    """Return a callback that compares module outputs with `predicted`, and adds to `found`."""
    times: dict[tuple[str, str], int] = {}

    def leave(name: str, output: Any) -> None:
        def compare(x: torch.Tensor, slot: str) -> torch.Tensor:
            with torch._C.DisableTorchFunction():  # not a call of the model's code
                shape = tuple(x.shape) if x.is_floating_point() else None
            if shape is None:
                return x  # only floating-point tensors are compared
            k = times.get((name, slot), 0)
            times[(name, slot)] = k + 1
            want = predicted.get((name, slot), [])
            if k < len(want) and shape != want[k]:
                text = f"output '{slot}' has shape {list(shape)}, not {list(want[k])}"
                found.append(Mismatch(name, text))
            return x

        map_slots(output, "", compare)

    return leave
