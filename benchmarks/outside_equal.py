"""Compares a small split model with the unsharded one, planned from its directory without inputs.

Of an architecture outside text, the first small config is taken whose model runs on the CPU. It is
saved, planned from what was saved, and each rank reads its part of the weights. All floating
outputs and all gradients are compared, on ranks that are threads.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardwright
from benchmarks.compare import differences
from benchmarks.outside_sizes import configs, parts
from benchmarks.zoo import Row
from benchmarks.zoo_case import CASTS, EXACT, SINGLE, Casts, plan_directory
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.numeric import random_model
from shardwright.planner.trace.model.source import from_config
from shardwright.planner.trace.runs.example_calls import example_call
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.config import read_config
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import weigh
from tests.ranks import run_ranks

MOST = 80_000_000
"""Most parameters of a model that is compared."""

DRAWS = 8
"""How often the parameters of a model are rounded at random to see what rounding does to it."""

Outcome = tuple[list[Tensor], dict[str, Tensor]]
"""Floating outputs, and gradients by parameter."""


def compared(kind: str, cls: str, tp: int) -> Row:
    """Return the row of a model type: how far its outputs and gradients are off."""
    found = _small(kind, cls)
    if isinstance(found, str):
        return {"verdict": "no small model", "why": found}
    config, model, given, want, tolerance = found
    size = {"parameters": sum(p.numel() for p in model.parameters()), "tolerance": tolerance}
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan, load = _from(folder, config, model, tp)
            ranks = run_ranks(tp, lambda mesh: _split(load(mesh), given))
    except ShardwrightError as error:
        return size | {"verdict": "refused", "why": repr(error)[:300]}
    except Exception as error:
        return size | {"verdict": "raw", "why": repr(error)[:300]}
    if any(call.draws == "always" for call in plan.calls):
        return size | {"verdict": "draws random numbers"}  # threads share a generator
    share = plan.predicted.parameter_bytes[0] / plan.predicted.unsharded_bytes
    outputs = max(_outputs_apart(got, want[0]) for got, _ in ranks)
    grads = {n: g for n, g in want[1].items() if g.isfinite().all()}
    apart = [differences(got, grads) for _, got in ranks]
    worst, gradients = max(
        ((n, v) for each in apart for n, v in each.items()), default=("", 0.0),
        key=lambda one: (one[1] != one[1], one[1]),
    )  # fmt: skip
    row = size | {"share": round(share, 3), "outputs": outputs, "gradients": gradients}
    row |= {"compared": len(grads), "worst": worst}
    if outputs <= tolerance and gradients <= tolerance:  # NaN is wrong
        return row | {"verdict": "equal"}
    # What rounding of its parameters does to the model, the order of sums may do as well.
    shaken = [_step(_shaken(model, seed), given) for seed in range(DRAWS)]
    by_rounding = [value for _, each in shaken for value in differences(each, grads).values()]
    moved = [_outputs_apart(each, want[0]) for each, _ in shaken]
    most = max(tolerance, *moved), max(tolerance, *by_rounding)
    likely = outputs <= most[0] and gradients <= most[1]
    return row | {"verdict": "ill-conditioned" if likely else "wrong", "by_rounding": most}


def timed(kind: str, cls: str, tp: int) -> Row:
    """Return the row of a model type: processor seconds to plan its small model as users do.

    The small model is in float32 afterwards.
    """
    found = _small(kind, cls)
    if isinstance(found, str):
        return {"verdict": "no small model", "why": found}
    with tempfile.TemporaryDirectory() as folder:
        found[1].float().save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        begun = time.process_time()
        try:
            shardwright.plan(folder, tp)
        except ShardwrightError as error:
            return {"verdict": "refused", "why": repr(error)[:300]}
        return {"verdict": "planned", "planning": round(time.process_time() - begun, 2)}


def _shaken(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a model whose parameters are off by one in the last place."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            signs = torch.randint(2, p.shape, generator=generator).to(p.dtype) * 2 - 1
            p.mul_(1 + signs * torch.finfo(p.dtype).eps)
    return model


@lru_cache(maxsize=1)
def _small(kind: str, cls: str) -> tuple[Any, nn.Module, dict[str, Any], Outcome, float] | str:
    """Return the first config that runs, its model, inputs, outcome, and the tolerance.

    If there is none, return why the first of them does not.
    """
    why = ""
    for config in configs(kind):
        if isinstance(config, Exception):
            why = why or repr(config)
            continue
        config.architectures = [cls]
        if (fault := _unreadable(config)) is not None:
            why = why or fault
            continue
        config._experts_implementation = "batched_mm"  # torch's grouped mm has no float64
        for dtype in (torch.float64, torch.float32):
            try:
                meta = from_config(config)
                if type(meta).forward is nn.Module.forward:
                    return f"{cls} has no forward: a model is a part of it"
                if (size := sum(p.numel() for p in meta.parameters())) > MOST:
                    why = why or f"it has {size:,} parameters"
                    break
                model = _read_again(random_model(config, dtype), dtype)
                given = _values(example_call(meta), config, dtype)
                with Casts(dtype) as casts:
                    want = _step(copy.deepcopy(model), given)
            except Exception as error:  # sizes do not fit together, or the code mixes dtypes
                why = why or repr(error.__cause__ or error)
                continue
            single = dtype == torch.float32
            return config, model, given, want, SINGLE if single else CASTS if casts.found else EXACT
    return why[:300]


def _read_again(model: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model as `from_pretrained` reads it: it computes some buffers in float32.

    It does not keep what code has frozen; `shardwright.load` does.

    Raises:
        ValueError: it does not find what it has saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        how = {"config": model.config, "dtype": dtype, "output_loading_info": True}
        found, info = type(model).from_pretrained(folder, **how)
    if lost := sorted(info["missing_keys"]):
        raise ValueError(f"transformers does not find '{lost[0]}' in what it has saved")
    for name, parameter in model.named_parameters():
        found.get_parameter(name).requires_grad_(parameter.requires_grad)
    return found.eval()


def _unreadable(config: Any) -> str | None:
    """Return why a config cannot be read from where it was saved; None if it can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
            read_config(folder)
        except Exception as error:  # transformers checks entries only then
            return repr(error)
    return None


def _values(example: dict[str, Any], config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return an example call with numbers: random ones where it has none."""
    generator = torch.Generator().manual_seed(0)
    sizes = [getattr(part, "vocab_size", None) for part in parts(config)]
    vocabulary = min((n for n in sizes if type(n) is int and n > 2), default=3)
    special = {v for part in parts(config) for k, v in vars(part).items()
               if type(v) is int and "token" in k}  # fmt: skip
    text = [n for n in range(2, min(vocabulary, 64)) if n not in special] or [1]

    def made(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "meta":
            return value
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator, dtype=dtype)
            return drawn.abs() if "patches" in name else drawn  # in front of them are their places
        if value.dtype == torch.bool or "mask" in name:
            return torch.ones(value.shape, dtype=value.dtype)
        most = len(text) if name.endswith("ids") else 2
        drawn = torch.randint(most, value.shape, generator=generator)
        return torch.tensor(text)[drawn] if name.endswith("input_ids") else drawn % 2

    return {name: made(name, value) for name, value in example.items()}


def _step(model: nn.Module, given: dict[str, Any]) -> Outcome:
    """Return all floating outputs, and the gradients of a weighting of them."""
    torch.manual_seed(0)
    output = model(**copy.deepcopy(given))
    found = [t for t in tree_leaves(_plain(output)) if isinstance(t, Tensor)]
    found = [t for t in found if t.is_floating_point()]
    if any(t.requires_grad for t in found):
        weigh(found).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [t.detach() for t in found], grads


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "to_tuple") else output


def _from(
    folder: str, config: Any, model: nn.Module, tp: int
) -> tuple[Plan, Callable[[Mesh], nn.Module]]:
    """Save a model; return the plan for what was saved, and what loads a rank's part of it."""
    model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    chosen = config._experts_implementation
    plan = plan_directory(folder, tp, Checkpoint.open(folder).dtype, chosen)
    how = {"experts_implementation": chosen} if chosen else {}

    def load(mesh: Mesh) -> nn.Module:
        return shardwright.load(folder, plan, mesh=mesh.device_mesh, device="cpu", **how)

    return plan, load


def _split(local: nn.Module, given: dict[str, Any]) -> Outcome:
    outputs, grads = _step(local, given)
    return outputs, full_tensors(local, grads)


def _outputs_apart(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, as a share of the largest number of its tensor, or of 1."""
    if [t.shape for t in got] != [t.shape for t in want]:
        return math.inf
    apart = 0.0
    for a, b in zip(got, want, strict=True):
        scale = max(_largest(b), 1.0)
        same = (a == b) | (a.isnan() & b.isnan())
        off = torch.where(same, 0.0, (a - b).abs()).double()
        apart = max(apart, float(off.nan_to_num(math.inf).max()) / scale if off.numel() else 0.0)
    return apart


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
