"""What becomes of a made module that is split: equal to the whole one, refused, or a bug."""

from __future__ import annotations

import copy
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.uses.subject import tensors
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.made.modules import WIDTH, WORDS, imported
from tests.planner.equal import randomize, weigh
from tests.ranks import run_ranks

TRACED, CALLS = (3, 19), (((2, 7), False), ((5, 11), True), ((1, 6), False))
"""Batch and sequence of the trace, and of calls: whether these are in training mode."""

EXACT, ROUNDED = 1e-9, 1e-12
BUGS = ("wrong", "raw")
"""Outcomes that must not be."""


class Outcome(NamedTuple):
    """`equal`, `unplanned`, `refused` (some calls), `unfit` (the whole one does not run), or a bug.

    And what it is about; and the share of the parameters that a rank has.
    """

    word: str
    text: str = ""
    share: float = 1.0


def outcome(source: str, tp: int, folder: Path | None = None) -> Outcome:
    """Plan the module of a source, run it on threads as ranks, and compare with the whole one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = imported(source, folder)().double().eval()
        randomize(model)
        wanted = [_wanted(model, _given(source, *sizes), trains) for sizes, trains in CALLS]
        if None in wanted:
            return Outcome("unfit")
        try:
            plan = planning.plan(model, tp, args=_given(source, *TRACED), batch=2, seq=7)
        except ShardwrightError as error:
            return Outcome("unplanned", str(error))
        except Exception as error:
            return Outcome("raw", _text(error))
        return _run(model, source, plan, wanted)


def _given(source: str, b: int, t: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(b)
    if "def forward(self, ids)" in source:
        return (torch.randint(WORDS, (b, t), generator=generator),)
    return (torch.randn(b, t, WIDTH, dtype=torch.float64, generator=generator),)


def _wanted(model: nn.Module, args: tuple[Tensor, ...], trains: bool) -> Any:
    """What the whole module gives; None where it does not run, or only rounding is seen."""
    try:
        found = _shown(copy.deepcopy(model), args, trains)
    except (RuntimeError, IndexError, ValueError):
        return None
    near = copy.deepcopy(model)
    with torch.no_grad():
        for p in near.parameters():
            p.mul_(1 + ROUNDED * torch.randn_like(p))
    other = _shown(near, args, trains)
    return None if _apart(found, other, 1e2 * EXACT) else found


def _shown(model: nn.Module, args: tuple[Tensor, ...], trains: bool) -> dict[str, Any]:
    """What is given out, gradients of all that is given and owned, and what is left behind.

    That is after two passes: in buffers, and in attributes for users to see.
    """
    for module in model.modules():
        for name in [
            n for n in vars(module) if n[0] == "p" and isinstance(getattr(module, n), float)
        ]:
            setattr(module, name, 0.0)  # dropout: ranks on threads share one generator
    model.train(trains)
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    results = [model(*given) for _ in range(2)]
    outputs = [tensors(result) for result in results]
    left = [
        (f"{path}.{name}", value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.startswith("seen")
    ]
    (weigh(outputs) / 10).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    held = {n: x.clone() for n, x in model.named_buffers() if x.is_floating_point()}
    out = {f"output {i}.{k}": x for i, o in enumerate(outputs) for k, x in enumerate(o)}
    out |= {f"in {name} {i}": x for name, value in left for i, x in enumerate(tensors(value))}
    out |= {f"gradient of input {i}": x.grad for i, x in enumerate(given) if x.grad is not None}
    out |= full_tensors(model, grads | held)
    plain = {"plain values": _plain(results)} | {f"in {n}": _plain(value) for n, value in left}
    return {n: x.detach() for n, x in out.items()} | plain


def _plain(value: Any) -> str:
    """What is around tensors, as text."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, dict):
        return str({_plain(k): _plain(v) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    return _plain(vars(value)) if hasattr(value, "__dict__") else repr(value)


def _run(model: nn.Module, source: str, plan: Plan, wanted: list[dict[str, Any]]) -> Outcome:
    share = plan.predicted.parameter_bytes[0] / max(plan.predicted.unsharded_bytes, 1)
    refused = ""
    for (sizes, trains), want in zip(CALLS, wanted, strict=True):

        def rank(mesh: Mesh, sizes: Any = sizes, trains: bool = trains) -> dict[str, Any]:
            return _shown(apply(copy.deepcopy(model), plan, mesh), _given(source, *sizes), trains)

        try:
            for found in run_ranks(plan.world_size, rank):
                if text := _apart(found, want, EXACT):
                    return Outcome(
                        "wrong", f"{sizes} {'train' if trains else 'eval'}: {text}", share
                    )
        except ShardwrightError as error:
            refused = refused or str(error)
        except Exception as error:
            return Outcome("raw", _text(error), share)
    return Outcome("refused" if refused else "equal", refused, share)


def _apart(found: dict[str, Any], want: dict[str, Any], allowed: float) -> str:
    """What differs, if something does."""
    if found.keys() != want.keys():
        return f"here or there alone: {', '.join(sorted(found.keys() ^ want.keys()))}"
    for name, x in want.items():
        y = found[name]
        if isinstance(x, str):
            if x != y:
                return f"{name}: {y} for {x}"
            continue
        x, y = x.double(), y.double()
        if y.shape != x.shape:
            return f"{name} is {list(y.shape)} for {list(x.shape)}"
        scale = max(float(x.abs().max()), 1.0) if x.numel() else 1.0
        off = float((x - y).abs().max()) if x.numel() else 0.0
        if not off <= allowed * scale:
            return f"{name} is off by {off:.1e} of {scale:.1e}"
    return ""


def _text(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__}: {str(error)[:300]} ({' '.join(at)})"
