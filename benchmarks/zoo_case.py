"""One tiny architecture: planned, split and compared with the whole model; a row of the sweep."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright
from benchmarks.compare import compare, reference
from shardwright.errors import ShardwrightError
from shardwright.planner.plan_file import Plan
from shardwright.runtime.mesh import Mesh
from tests import zoo

EXACT, CASTS, SINGLE = 1e-9, 1e-5, 1e-4
"""Differences allowed: of models that compute in float64 throughout, of those that cast to float32
inside, and of models in float32."""
LARGE = 0.01
"""What stays whole wants a reason from this share of all bytes on."""
FIGURES = ("logits", "gradients", "decode")


def build(kind: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A seeded tiny model, with torch's attention if it has it, and experts that know `dtype`."""
    try:
        config, built = zoo.build(name, kind=kind, attn="sdpa")
    except ValueError:
        config, built = zoo.build(name, kind=kind, attn=None)
    model: Any = built.to(dtype)
    if dtype == torch.float64 and "grouped_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("batched_mm")  # torch's grouped product has no float64
    return config, model


def compared(
    dtype: torch.dtype, kind: str, name: str, rank: int, tp: int, mesh: Mesh
) -> dict[str, Any]:
    """Compare one model on this rank and all others; every rank returns the same row.

    A plan that cannot be made is a row with its error. What goes wrong after that is raised.
    """
    begun = time.perf_counter()
    config, model = build(kind, name, dtype)
    inputs = zoo.inputs(name, config, kind=kind)
    try:
        with _Casts(dtype) as casts:
            expected = reference(model, inputs)
    except RuntimeError:
        if dtype == torch.float32:
            raise
        # The model mixes dtypes if it is not in its own.
        return compared(torch.float32, kind, name, rank, tp, mesh)
    row: dict[str, Any] = {"kind": kind, "name": name, "params": len(list(model.parameters()))}
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [shardwright.plan(model, tp=tp, kwargs=zoo.example(name, config, kind)).to_json()]
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    row["plan_seconds"] = round(time.perf_counter() - begun, 1)
    if isinstance(box[0], ShardwrightError):
        return row | {"error": f"{type(box[0]).__name__}: {box[0]}"}
    plan = Plan.from_json(box[0])
    found = compare(model, inputs, plan, mesh, expected)
    everyone: list[Any] = [None] * tp
    dist.all_gather_object(everyone, found.as_dict())
    for key in FIGURES:
        figures = [r[key] for r in everyone if r[key] is not None]
        row[key] = max(figures, key=lambda v: (v != v, v), default=None)
    row["dtype"] = str(dtype).removeprefix("torch.")
    row["tolerance"] = SINGLE if dtype == torch.float32 else CASTS if casts.found else EXACT
    row["experts"] = sorted(set(model.get_experts_implementation().values()) - {"eager"})
    row |= _planned(plan, model)
    row |= {"split": found.split, "worst": found.worst}
    row |= {"forward": dict(found.forward), "backward": dict(found.backward)}
    row["seconds"] = round(time.perf_counter() - begun, 1)
    return row


def passed(row: dict[str, Any]) -> bool:
    """Whether it was planned, and all differences are within the tolerance."""
    if "error" in row:
        return False
    # Written so that NaN fails.
    return all(row[key] is None or row[key] <= row["tolerance"] for key in FIGURES)


def _planned(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What is known before anything runs."""
    predicted = plan.predicted
    explained = {w.parameter: w.reason for w in plan.whole}
    return {
        "status": plan.solver.status,
        "bytes": max(predicted.parameter_bytes),
        "whole_bytes": predicted.whole_bytes,
        "whole": explained,
        "opaque": dict(plan.opaque),
        "predicted": {
            phase: {c.kind: c.count for c in predicted.collectives if c.phase == phase}
            for phase in ("forward", "backward")
        },
    }


class _Casts(TorchDispatchMode):
    """Tells whether anything is computed in less precision than `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.found = dtype, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if self.dtype in given and any(d.is_floating_point and d != self.dtype for d in made):
            self.found = True
        return out
