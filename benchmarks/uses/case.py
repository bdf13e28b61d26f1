"""One use of one model: the whole and the split model do the same, and all is compared."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import shardwright
from benchmarks.compare import differences, of_all
from benchmarks.uses import calls, decoding, inside, modes, state, steps
from benchmarks.uses.models import Made, make
from benchmarks.uses.subject import USES, Subject, Unfit, tensors
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.gather import full_tensors
from shardwright.runtime.mesh import Mesh

GROUPS = (calls, modes, inside, steps, state, decoding)
"""The files whose uses are run."""
VERDICTS = ("unfit", "equal", "refused", "unplanned", "wrong", "raw")
"""From what says nothing to the worst: what any rank has is the row's."""


class Shown(NamedTuple):
    """What a use has shown: numbers, and the gradients of parameters."""

    values: list[Tensor]
    gradients: Mapping[str, Tensor]


def compared(name: str, use: str, rank: int, tp: int, mesh: Mesh) -> dict[str, Any]:
    """The row of a model and a use; all ranks return the same."""
    made, plan = _prepared(name, rank, tp)
    if isinstance(plan, str):
        return _row(name, use, tp, "unplanned", plan)
    expected = _whole(made, use)
    if expected is None:
        return _row(name, use, tp, "unfit")
    every = of_all(_outcome(made, use, plan, mesh, expected), tp)
    verdict, text = max(every, key=lambda found: VERDICTS.index(found[0]))
    if verdict == "refused" and len({v for v, _ in every}) > 1:
        verdict, text = "raw", f"refused on some ranks only: {text}"
    return _row(name, use, tp, verdict, text)


def _row(name: str, use: str, tp: int, verdict: str, text: str = "") -> dict[str, Any]:
    return {"kind": name, "name": use, "tp": tp, "verdict": verdict, "text": text}


@lru_cache(maxsize=1)
def _prepared(name: str, rank: int, tp: int) -> tuple[Made, Plan | str]:
    """The model, and the plan that rank 0 makes, or why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make(name)
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [
                (
                    True,
                    shardwright.plan(made.model, tp=tp, objective="memory", **made.plan).to_json(),
                )
            ]
        except Exception as error:
            box = [(False, _text(error))]
    dist.broadcast_object_list(box)
    planned, text = box[0]
    return made, Plan.from_json(text) if planned else text


def _whole(made: Made, use: str) -> Shown | None:
    """What the whole model shows; None where it cannot do that."""
    model = copy.deepcopy(made.model)
    try:
        return _shown(made, use, model)
    except Exception:  # whatever it is, the model itself cannot do it
        return None


def _shown(made: Made, use: str, model: Any) -> Shown:
    torch.manual_seed(0)
    subject = Subject(model, made.inputs, made.args, copy.deepcopy(made.model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [t.detach().clone() for t in tensors(USES[use].run(subject))]
    model = subject.model
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Shown(values, full_tensors(model, gradients) if gradients else {})


def _outcome(made: Made, use: str, plan: Plan, mesh: Mesh, expected: Shown) -> tuple[str, str]:
    """Verdict and what it is about, on this rank."""
    allowed = max(made.tolerance, USES[use].tolerance)
    try:
        found = _shown(made, use, apply(copy.deepcopy(made.model), plan, mesh))
    except ShardwrightError as error:
        return "refused", str(error)
    except Unfit:
        return "wrong", "the split model has no such thing"
    except Exception as error:
        return "raw", _text(error)
    return _verdict(found, expected, allowed)


def _verdict(found: Shown, expected: Shown, allowed: float) -> tuple[str, str]:
    if len(found.values) != len(expected.values):
        return "wrong", f"{len(found.values)} tensors for {len(expected.values)}"
    for i, (got, want) in enumerate(zip(found.values, expected.values, strict=True)):
        if got.shape != want.shape:
            return "wrong", f"output {i} is {list(got.shape)} for {list(want.shape)}"
        if not _close(got, want, allowed):
            return "wrong", f"output {i} is off by {_apart(got, want):.1e}"
    if missing := found.gradients.keys() ^ expected.gradients.keys():
        return "wrong", f"gradients here or there alone: {', '.join(sorted(missing)[:3])}"
    off = differences(found.gradients, expected.gradients)
    worst = max(off, key=lambda n: (off[n] != off[n], off[n]), default="")
    if worst and not off[worst] <= allowed:
        return "wrong", f"the gradient of {worst} is off by {off[worst]:.1e}"
    return "equal", ""


def _apart(got: Tensor, want: Tensor) -> float:
    if not got.is_floating_point():
        return float((got != want).sum())
    both = (got - want).double()[~(got.isnan() & want.isnan()) & (got != want)]
    return float(both.abs().max()) if both.numel() else 0.0


def _close(got: Tensor, want: Tensor, allowed: float) -> bool:
    """Within the tolerance, as a share of the largest entry; written so that NaN fails."""
    finite = want[want.isfinite()] if want.is_floating_point() else want
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, 1.0)
    return _apart(got, want) <= allowed * scale


def _text(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{at}"
