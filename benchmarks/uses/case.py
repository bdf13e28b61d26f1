"""One use of one model: the whole and the split model do the same, and all is compared."""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import differences, of_all
from benchmarks.uses import calls, decoding, inside, modes, state, steps
from benchmarks.uses.models import Made, make
from benchmarks.uses.subject import MAKING, USES, Subject, Unfit, tensors
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.boundary.root import RootModule
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning

T = TypeVar("T")

GROUPS = (calls, modes, inside, steps, state, decoding)
"""The files whose uses are run."""
VERDICTS = ("unfit", "equal", "refused", "denied", "unplanned", "wrong", "raw")
"""From what says nothing to the worst, and that of any rank is the row's. Denied is what is refused
though it never should be."""
TORCH_S = ("got mixed torch.Tensor and DTensor", "Sharding propagation failed")
"""What torch says where it does not know how to go on with parts of a whole: it refuses, too."""


class Shown(NamedTuple):
    """What a use has shown: numbers, and the gradients of parameters."""

    values: list[Tensor]
    gradients: Mapping[str, Tensor]


def compared(plans: str, name: str, use: str, rank: int, tp: int, mesh: Mesh) -> dict[str, Any]:
    """The row of a model and a use; all ranks return the same.

    Plans are kept in the folder `plans`, for processes that take over from others.
    """
    made, plan = _preparing(rank)(plans, name, use if USES[use].before else "", tp)
    if made is None:
        return _row(name, use, tp, "unfit", str(plan))
    expected = _of_first(rank, lambda: _whole(made, use))
    if isinstance(expected, str):
        return _row(name, use, tp, "unfit", expected)
    if isinstance(plan, str):
        return _row(name, use, tp, "unplanned", plan)
    with TemporaryDirectory() as own:
        split = apply(copy.deepcopy(made.model), plan, mesh)
        folder = _of_first(rank, lambda: own)
        every = of_all(_outcome(made, use, split, folder, expected), tp)
    verdict, text = max(every, key=lambda found: VERDICTS.index(found[0]))
    if verdict == "refused" and len({v for v, _ in every}) > 1:
        verdict, text = "raw", f"refused on some ranks only: {text}"
    if verdict == "refused" and not USES[use].may_refuse:
        verdict = "denied"
    return _row(name, use, tp, verdict, text)


def _row(name: str, use: str, tp: int, verdict: str, text: str = "") -> dict[str, Any]:
    return {"kind": name, "name": use, "tp": tp, "verdict": verdict, "text": text}


def _of_first(rank: int, work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on all: what is the same on each is computed once."""
    box: list[Any] = [work() if rank == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


@cache
def _preparing(rank: int) -> Callable[[str, str, str, int], tuple[Made | None, Plan | str]]:
    """Prepares models for a rank, which keeps its last ones: it may be a thread beside others."""
    return lru_cache(maxsize=2)(partial(_prepared, rank))


def _prepared(
    rank: int, plans: str, name: str, changed: str, tp: int
) -> tuple[Made | None, Plan | str]:
    """The model, `changed` as that use has it, and the plan of rank 0, or why there is none."""
    with MAKING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make(name)
        if changed:
            before = USES[changed].before
            assert before is not None
            torch.manual_seed(1)  # what comes in is drawn alike, too
            try:
                made = replace(made, model=before(made.model))
            except Exception as error:  # the model is not made for that
                return None, _text(error)
    file = Path(plans) / f"{name.replace('/', '_')}_{changed}_{tp}.json"
    planned, text = _of_first(rank, lambda: _planned(file, tp, made))
    return made, Plan.from_json(text) if planned else text


def _planned(file: Path, tp: int, made: Made) -> tuple[bool, str]:
    """The plan as JSON, or why there is none, and whether there is one."""
    if file.exists():
        return True, file.read_text()
    try:
        with MAKING:  # planning draws, too
            text = planning.proven(made.model, tp=tp, **made.plan).to_json()
    except Exception as error:
        return False, _text(error)
    file.write_text(text)
    return True, text


def _whole(made: Made, use: str) -> Shown | str:
    """What the whole model shows; or why it shows nothing."""
    try:
        with TemporaryDirectory() as folder:
            shown = _shown(made, use, copy.deepcopy(made.model), folder)
    except Unfit:
        return ""
    except Exception as error:  # whatever it is, the model itself cannot do it
        return _text(error)
    lost = [name for name, grad in shown.gradients.items() if grad.isnan().any()]
    return f"the gradient of {lost[0]} is NaN in the whole model" if lost else shown


def _shown(made: Made, use: str, model: Any, folder: str) -> Shown:
    torch.manual_seed(0)
    # Of other generators ranks that share a model have their own: the first one's counts.
    own = dist.get_rank() if isinstance(model, RootModule) else 0
    random.seed(own)
    numpy.random.seed(own)
    # Copies: some write into what they are given.
    given = copy.deepcopy((made.inputs, made.args))
    subject = Subject(model, *given, copy.deepcopy(made.model), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [t.detach().clone() for t in tensors(USES[use].run(subject))]
    model = subject.model
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Shown(values, full_tensors(model, gradients) if gradients else {})


def _outcome(made: Made, use: str, split: Any, folder: str, expected: Shown) -> tuple[str, str]:
    """Verdict and what it is about, on this rank."""
    allowed = max(made.tolerance, USES[use].tolerance)
    try:
        found = _shown(made, use, split, folder)
    except Unfit:
        return "wrong", "the split model has no such thing"
    except Exception as error:
        return _refusal(error) or ("raw", _text(error))
    return _verdict(found, expected, allowed)


def _refusal(error: BaseException | None) -> tuple[str, str] | None:
    """The verdict on an error of ours, also where torch put it into one of its own, or torch's."""
    if error is None:
        return None
    if isinstance(error, ShardwrightError):
        return "refused", str(error)
    if any(words in str(error) for words in TORCH_S):
        return "refused", f"by torch: {_text(error)}"
    return _refusal(error.__cause__ or error.__context__)


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
