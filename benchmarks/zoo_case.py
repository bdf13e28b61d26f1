"""Plans and splits one tiny architecture and compares it with the unsharded model, as a row."""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright
from benchmarks.compare import Reference, badness, compare, of_all, predicted, reference
from benchmarks.quantize import DENSE, counts_for, quantize
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.config import read_config
from tests import planning, zoo

EXACT, CASTS, SINGLE = 1e-9, 1e-5, 1e-4
"""Tolerances for models that compute in float64 throughout, for those that cast to float32 inside,
and for models in float32."""
FIGURES = {"logits": "LOGITS", "padded": "PADDED", "gradients": "GRADS", "decode": "DECODE"}
"""Differences in a row -> their name in a table."""


def build(kind: str, name: str, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """Build a seeded tiny model, with torch's attention if possible, and experts for `dtype`.

    `changes` are keys of its config.
    """
    try:
        config, built = zoo.build(name, kind=kind, attn="sdpa", **changes)
    except ValueError:
        config, built = zoo.build(name, kind=kind, attn=None, **changes)
    model: Any = built.to(dtype)
    if dtype == torch.float64 and "grouped_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("batched_mm")  # torch's grouped mm has no float64
    return config, model


@dataclass(frozen=True)
class Case:
    """An unsharded model, and the `tolerance` of its split one."""

    model: Any
    inputs: dict[str, Any]
    example: dict[str, Any] | None
    """Arguments to plan it with, if it needs others than text models do."""
    expected: Reference
    dtype: torch.dtype
    tolerance: float
    device: str


def case(kind: str, name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
    """Return one architecture; in float32 if it mixes dtypes in any other than its own."""
    config, model = build(kind, name, dtype)
    model.to(device)
    inputs = {
        k: v.to(device).detach().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v
        for k, v in zoo.inputs(name, config, kind=kind, dtype=dtype).items()
    }
    example = zoo.example(name, config, kind, dtype)
    try:
        with Casts(dtype) as casts:
            expected = reference(model, inputs)
    except RuntimeError:
        if dtype == torch.float32:
            raise
        return case(kind, name, torch.float32, device)
    tolerance = SINGLE if dtype == torch.float32 else CASTS if casts.found else EXACT
    return Case(model, inputs, example, expected, dtype, tolerance, device)


def compared(
    dtype: torch.dtype, saved: bool | str, kind: str, name: str, rank: int, tp: int, mesh: Mesh
) -> dict[str, Any]:
    """Compare one model on all ranks; every rank returns the same row.

    The split model has the unsharded one's weights. With `saved`, the unsharded model is saved
    instead, planned from its directory, and loaded in full by transformers and in parts by us.
    "fp8" and "int4" quantize what was saved; then there are no gradients of weights. If no plan can
    be made, the row has the error. Later errors are raised.
    """
    begun = time.perf_counter()
    device = "cpu" if mesh.device_mesh is None else mesh.device_mesh.device_type
    whole = case(kind, name, dtype, device)
    directory = _save(whole.model, rank, saved) if saved else ""
    quantized = isinstance(saved, str)
    if saved:
        try:
            whole = _read_again(whole, f"{directory}/{DENSE}" if quantized else directory)
        except RuntimeError:  # some parameters have a fixed dtype
            if dtype == torch.float32:
                raise
            _delete(directory, rank)
            return compared(torch.float32, saved, kind, name, rank, tp, mesh)
    model = whole.model
    row: dict[str, Any] = {"kind": kind, "name": name, "params": len(list(model.parameters()))}
    box: list[Any] = [None]
    if rank == 0:
        try:
            if saved:
                plan = plan_directory(directory, tp, whole.dtype, **experts_of(model))
            else:
                plan = planning.proven(model, tp=tp, kwargs=whole.example)
            box = [plan.to_json()]
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], ShardwrightError):
        return row | {"error": f"{type(box[0]).__name__}: {box[0]}"}
    plan = Plan.from_json(box[0])
    loaded = _load(whole, plan, directory, rank) if saved else None
    found = compare(model, whole.inputs, plan, mesh, whole.expected, loaded)
    everyone = of_all(found.as_dict(), tp)
    for key in FIGURES:
        figures = [r[key] for r in everyone if r[key] is not None]
        row[key] = max(figures, key=badness, default=None)
    row["dtype"] = dtype_name(whole.dtype)
    row["tolerance"] = whole.tolerance
    row["experts"] = sorted(set(model.get_experts_implementation().values()) - {"eager"})
    row |= _planned(plan)
    row |= {"split": found.split, "worst": found.worst}
    row |= {"forward": dict(found.forward), "backward": dict(found.backward)}
    row["seconds"] = round(time.perf_counter() - begun, 1)
    return row


def passed(row: dict[str, Any]) -> bool:
    """Return whether it was planned, and all differences are within the tolerance."""
    if "error" in row:
        return False
    # Written so that NaN fails.
    return all(row[key] is None or row[key] <= row["tolerance"] for key in FIGURES)


def _save(model: Any, rank: int, saved: bool | str) -> str:
    """Return the folder in which rank 0 has saved the model with `save_pretrained`."""
    box = [tempfile.mkdtemp() if rank == 0 else ""]
    if rank == 0:
        model.save_pretrained(box[0], max_shard_size="100KB")
        if isinstance(saved, str):
            quantize(box[0], saved, counts_for(type(model).__name__))
    dist.broadcast_object_list(box)
    return box[0]


def _read_again(case: Case, directory: str) -> Case:
    """Return the case of what transformers loads from there: not all state of a model is saved.

    The model has not run yet: some models change themselves in their first run.
    """
    config = read_config(directory)
    read: dict[str, Any] = {"config": config, "dtype": case.dtype, **experts_of(case.model)}
    model = type(case.model).from_pretrained(directory, **read).to(case.device)
    return replace(case, model=model, expected=reference(copy.deepcopy(model), case.inputs))


def plan_directory(
    directory: str,
    tp: int,
    dtype: torch.dtype | str | None,
    experts_implementation: str | None = None,
) -> Plan:
    """Plan what lies in a directory, without a word on its inputs."""
    config = read_config(directory)
    config._experts_implementation = experts_implementation  # no config.json has it
    return planning.proven(config, tp, dtype=dtype)


def _load(case: Case, plan: Plan, directory: str, rank: int) -> Any:
    """Load the split model from the directory, and then delete that."""
    loaded = shardwright.load(directory, plan, device=case.device, **experts_of(case.model))
    _delete(directory, rank)
    return loaded


def _delete(directory: str, rank: int) -> None:
    """Delete the directory that all ranks have read."""
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)


def experts_of(model: Any) -> dict[str, Any]:
    """Return the arguments that give a loaded model the experts that `build` chose for `model`."""
    batched = "batched_mm" in model.get_experts_implementation().values()
    return {"experts_implementation": "batched_mm"} if batched else {}


def _planned(plan: Plan) -> dict[str, Any]:
    """Return what is known before anything runs."""
    return {
        "status": plan.solver.status,
        "bytes": max(plan.predicted.parameter_bytes),
        "whole_bytes": plan.predicted.unsharded_bytes,
        "whole": {w.parameter: w.reason for w in plan.replicated},
        "opaque": dict(plan.opaque),
        "predicted": predicted(plan),
    }


class Casts(TorchDispatchMode):
    """Detects whether anything is computed in less precision than `dtype`."""

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
