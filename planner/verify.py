"""Try a plan before it is written: apply it on meta, run the model's own code, compare every shape.

The planner reasons about a traced graph, the runtime runs the module's Python code. Whatever the
trace did not show (a number that should have been local, an attribute nobody saw) comes out here as
a wrong shape or an exception, and becomes a constraint.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from shardwright.errors import PlanError
from shardwright.planner.borders import map_slots
from shardwright.planner.calls import Calls, Notes, difference
from shardwright.planner.data_numbers import Asked, Questions
from shardwright.planner.fake_ops import LikeReal
from shardwright.planner.layout import Coords
from shardwright.planner.opaque import Opaque, Spec
from shardwright.planner.plan_file import Plan
from shardwright.planner.runs import Run, Runner
from shardwright.runtime.api import apply_modules
from shardwright.runtime.attention import by_heads
from shardwright.runtime.mesh import Mesh


@dataclass(frozen=True)
class Mismatch:
    """A module whose local forward is not what the plan says."""

    module: str
    text: str


def calls_of(root: nn.Module, runs: Sequence[Run], opaque: Opaque) -> Calls | None:
    """What the code of each module calls in `runs` of `root` as it is; None if it does not run."""
    module = copy.deepcopy(root)
    try:
        return _run(module, runs, follow(module), opaque)
    except Exception:  # whatever model code raises: its trial as a part will raise it again
        return None


def follow(
    root: nn.Module, leave: Callable[[str, Any], None] = lambda name, output: None
) -> list[str]:
    """Put hooks on the modules of `root`, for good: `leave` gets the name and output of each call.

    Gives the paths of the modules that run, the innermost last.
    """
    entered: list[str] = []
    for name, module in root.named_modules():

        def before(_: nn.Module, _args: Any, name: str = name) -> None:
            entered.append(name)

        def after(_: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            entered.pop()
            leave(name, output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return entered


def _run(module: nn.Module, runs: Sequence[Run], entered: list[str], opaque: Opaque) -> Calls:
    with Notes(entered) as notes:
        run_on_fake(module, runs, opaque)
    return notes.found


def run_on_fake(module: nn.Module, runs: Sequence[Run], opaque: Opaque) -> None:
    """Make `runs` of `module`, which is on meta, for what its hooks see.

    Modules in `opaque` do not run.

    On fake rather than plain meta tensors: model code knows them and does not ask for their values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    given = tree_map(
        lambda v: fake.from_tensor(v) if isinstance(v, torch.Tensor) else v,
        [(run.args, dict(run.kwargs)) for run in runs],
    )
    given = [Run(run.module, *both) for run, both in zip(runs, given, strict=True)]

    def empty(_name: str, _taken: list[torch.Tensor], given: list[Spec]) -> list[torch.Tensor]:
        return [spec.empty() for spec in given]

    asked = Asked(Questions(opaque))
    with (
        torch.no_grad(),
        opaque.standing_in(module, empty),
        fake,
        LikeReal(),
        _quiet(),
        asked,
        by_heads(module),
    ):
        Runner(module)(given)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep fake tensors from logging what becomes a `Mismatch`."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def run_local(
    root: nn.Module,
    runs: Sequence[Run],
    plan: Plan,
    coords: Coords,
    predicted: Mapping[tuple[str, str], list[tuple[int, ...]]],
    opaque: Opaque,
    whole_calls: Calls | None = None,
) -> Mismatch | None:
    """Apply `plan` to a copy of `root` without a process group, make `runs`, compare shapes.

    With `whole_calls`, compare what its code calls as well.
    """
    local = copy.deepcopy(root)
    try:
        apply_modules(local, plan, Mesh.shape_only(coords))
    except PlanError as error:
        return Mismatch("", str(error))
    calls: dict[tuple[str, str], int] = {}
    found: list[Mismatch] = []

    def leave(name: str, output: Any) -> None:
        def compare(x: torch.Tensor, slot: str) -> torch.Tensor:
            k = calls.get((name, slot), 0)
            calls[(name, slot)] = k + 1
            want = predicted.get((name, slot), [])
            if k < len(want) and tuple(x.shape) != want[k]:
                text = f"output '{slot}' has shape {list(x.shape)}, not {list(want[k])}"
                found.append(Mismatch(name, text))
            return x

        map_slots(output, "", compare)

    entered = follow(local, leave)
    try:
        noted = _run(local, runs, entered, opaque)
        if whole_calls is not None and (other := difference(whole_calls, noted)) is not None:
            found.append(Mismatch(*other))
    except Exception as error:  # whatever model code raises on sizes it does not expect
        text = str(error).strip().split("\n")[0]
        found.append(Mismatch(entered[-1] if entered else "", f"{type(error).__name__}: {text}"))
    return found[0] if found else None
