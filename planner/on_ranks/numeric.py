"""Runs a plan on CPU ranks and compares logits and gradients with the unsharded model's."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError, UsageError
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.launch import run_processes
from shardwright.planner.prepare import as_planned, prepare
from shardwright.planner.search.ladder import search
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.trace.model import python_references
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from shardwright.planner.trace.model.input_values import calls_by_name
from shardwright.planner.trace.runs.example_calls import text_inputs
from shardwright.runtime.model.build import as_dtype, building
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import USUAL, Hub

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = 1e-2
"""A gradient is compared relative to its own largest entry, or to this share of the largest entry
of all gradients if that is more: the gradient of a key's bias is zero except for rounding."""


@dataclass(frozen=True)
class Difference:
    """The largest differences between the split model and the unsharded one."""

    ranks: int
    layers: int
    dtype: str
    parameters: int
    logits: float
    gradients: float
    worst: str
    tolerance: float

    @property
    def ok(self) -> bool:
        """Return whether both differences are within the tolerance; NaN is not."""
        return self.logits <= self.tolerance and self.gradients <= self.tolerance


def compare(
    plan: Plan | str | Path,
    model: Any,
    layers: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    **hub: Any,
) -> Difference:
    """Start the plan's ranks as processes and compare them with the unsharded model.

    Weights are random and the same on each rank. Differences of logits are absolute; those of a
    gradient are relative to its largest entry.

    Args:
        plan: The plan, or its file.
        model: The model it was made for, as `shardwright.plan` takes it; a module must pickle.
        layers: Cut the model to this many layers first, and plan the smaller model with the same
            options. Only for a Hub id, directory or config.
        dtype: float32 or float64, or its name. Models that compute in float32 inside gain little
            by float64.
        trust_remote_code: Whether to run code that is shipped with the model.
        args: Inputs, as given for the plan; without any, random tokens.
        kwargs: Inputs by name; of several calls the first is compared.
        **hub: `revision`, `cache_dir`, `local_files_only`, `token`, as `plan` takes them.

    Raises:
        UsageError: the model has fewer layers, or its layers cannot be counted.
        DistributedError: a rank died.
    """
    plan, dtype = Plan.load(plan), as_dtype(dtype) or torch.float32
    of_hub = Hub(**hub, trust_remote_code=trust_remote_code)
    model = buildable(model, of_hub)
    given = {"args": args, "kwargs": kwargs}
    if layers is not None:
        model = cut(model, layers)
        how = {**as_planned(plan), **given, "trust_remote_code": trust_remote_code, **hub}
        asked = SolverOptions(objective=plan.objective.name)
        plan = search(prepare(model, **how), asked).plan
    answers = run_processes(
        plan.world_size, _on_rank, plan, model, dtype, (args, calls_by_name(kwargs)[0]), of_hub
    )
    parameters, logits, gradients, worst = answers[0]
    text = None if isinstance(model, nn.Module | str) else model.get_text_config()
    depth = getattr(text, "num_hidden_layers", 0)
    name = dtype_name(dtype)
    return Difference(
        plan.world_size, depth, name, parameters, logits, gradients, worst, TOLERANCE[dtype]
    )


def buildable(model: Any, hub: Hub = USUAL) -> Any:
    """Return what `random_model` takes for a model that is named as `shardwright.plan` takes it."""
    if isinstance(model, nn.Module) or python_references.is_code(model):
        return model
    if not isinstance(model, str | Path) and not hasattr(model, "to_dict"):
        raise ModelError(
            f"cannot compare a {type(model).__name__}: give a hub id, a directory, a config or a "
            "module"
        )
    return model if hasattr(model, "to_dict") else read_config(model, hub)


def cut(config: Any, layers: int) -> Any:
    """Copy a transformers config with `layers` layers; lists with an entry per layer are cut too.

    Counts of some of the layers, as of those that share a cache, are scaled where they are too
    large for so few layers.

    Raises:
        UsageError: the config has fewer layers, or is not a config.
    """
    if not hasattr(config, "get_text_config"):
        raise UsageError(
            "--layers needs a config to cut: give a directory or hub id, or all layers"
        )
    whole = copy.deepcopy(config)
    config = whole.get_text_config()
    have = getattr(config, "num_hidden_layers", None)
    if have is None or not 1 <= layers <= have:
        raise UsageError(f"--layers must be between 1 and the model's {have}, not {layers}")
    fields = {config.attribute_map.get("num_hidden_layers", "num_hidden_layers")}
    fields |= {"encoder_layers", "decoder_layers", "num_decoder_layers"} & vars(config).keys()
    for name, value in list(vars(config).items()):
        if name in fields:
            setattr(config, name, min(value, layers))
        elif isinstance(value, list) and len(value) == have:
            setattr(config, name, value[:layers])
        elif "layers" in name and type(value) is int and layers <= value < have:
            setattr(config, name, max(value * layers // have, 1))
    return whole


def _on_rank(
    plan: Plan, what: Any, dtype: torch.dtype, given: python_references.Inputs, hub: Hub
) -> tuple[int, float, float, str]:
    """Compare on a rank. Only rank 0 runs the unsharded model, and only its answer counts."""
    import torch.distributed as dist

    from shardwright.runtime.api import apply
    from shardwright.runtime.state.gather import full_tensors

    model = random_model(what, dtype, hub)
    args, kwargs = in_dtype(given, dtype) if any(given) else ((), random_inputs(model))
    want = run(model, *args, **kwargs) if dist.get_rank() == 0 else None
    apply(model, plan, timeout=1800)
    logits, local = run(model, *args, **kwargs)
    gradients = full_tensors(model, local)
    if want is None:
        return 0, 0.0, 0.0, ""
    return len(want[1]), (logits - want[0]).abs().max().item(), *differences(gradients, want[1])


def in_dtype(given: python_references.Inputs, dtype: torch.dtype) -> python_references.Inputs:
    """Cast floating tensors in the inputs to `dtype`."""
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, given
    )


def random_model(what: Any, dtype: torch.dtype, hub: Hub = USUAL) -> nn.Module:
    """Build a full-size model whose weights are random, none constant, and depend only on names.

    `what` is a config, a module, or the name of code that makes one of them.
    """
    torch.manual_seed(0)  # values that are not drawn again below must be equal on all ranks
    what = python_references.made(what) if python_references.is_code(what) else what
    if isinstance(what, nn.Module):
        model = what.to(dtype).eval()
    else:
        with building(what, hub) as cls:
            model = cls._from_config(copy.deepcopy(what), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    return model


def random_inputs(model: nn.Module, sizes: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Return the inputs that the model is traced with, but with random tokens.

    `sizes` has other sizes for some of the trace's.
    """
    config: Any = model.config
    generator, other = torch.Generator().manual_seed(0), sizes or {}
    vocabulary = config.get_text_config().vocab_size
    return {
        name: torch.randint(vocabulary, [other.get(n, n) for n in v.shape], generator=generator)
        if isinstance(v, Tensor)
        else v
        for name, v in text_inputs(model).items()
    }


def run(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of a fixed weighted sum of them."""
    model.zero_grad()
    output = model(*args, **kwargs)
    logits = getattr(output, "logits", None)
    if logits is None:
        found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not found:
            raise ModelError(f"{type(model).__name__} gives out nothing that has a gradient")
        logits = found[0]
    generator = torch.Generator().manual_seed(1)
    weighting = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    (logits * weighting).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of a gradient, and that parameter's name."""
    if missing := want.keys() ^ got.keys():
        return float("inf"), min(missing)
    floor = FLOOR * max((g.abs().max().item() for g in want.values()), default=0.0)
    found = {
        name: (got[name] - g).abs().max().item() / max(g.abs().max().item(), floor, 1e-300)
        for name, g in want.items()
    }
    nan = [name for name, value in found.items() if value != value]
    worst = nan[0] if nan else max(found, key=lambda name: found[name])
    return found[worst], worst
