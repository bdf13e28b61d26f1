"""Compares a split model with the unsharded one on every rank.

It compares logits, without and with a padding mask, gradients, and a decode step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.trace.runs.further_runs import padding
from shardwright.runtime.api import apply
from shardwright.runtime.boundary.module_boundary import mesh_of, placements
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.zoo import logits as logits_of

T = TypeVar("T")
FLOOR = 1e-2
"""A gradient is compared relative to its own largest entry, or to this share of the largest entry
of all: some gradients are zero except for rounding (the bias of attention keys)."""
PADDING = 3
"""Padding tokens at the start of sequences."""


@dataclass(frozen=True)
class Comparison:
    """Largest differences on one rank, and what was counted there."""

    logits: float
    gradients: float | None
    """None if the unsharded model has no gradients."""
    worst: str
    decode: float | None
    padded: float | None
    """For logits of sequences of several lengths; None if the unsharded model takes no masks."""
    split: float
    """Share of the block weights' bytes that is split."""
    forward: Mapping[str, int]
    backward: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return asdict(self)


def weighing_loss(output: Any) -> torch.Tensor:
    """Return a sum of the logits with fixed weights: each gradient depends on every logit."""
    values = logits_of(output).double()
    counted = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
    weights = torch.sin(counted).view(values.shape)
    return (values * weights).sum()


def predicted(plan: Plan) -> dict[str, dict[str, int]]:
    """Return the plan's number of collectives: phase -> kind -> count."""
    return {
        phase: {c.kind: c.count for c in plan.predicted.collectives if c.phase == phase}
        for phase in ("forward", "backward")
    }


def of_all(mine: T, tp: int) -> list[T]:
    """Return each rank's value; every rank must call this."""
    out: list[Any] = [None] * tp
    dist.all_gather_object(out, mine)
    return out


def badness(value: float) -> tuple[bool, float]:
    """Return a sort key by which NaN is the worst value."""
    return value != value, value


@dataclass(frozen=True)
class Reference:
    """What the unsharded model computes."""

    logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor] | None
    decode: torch.Tensor | None
    padded: torch.Tensor | None


def reference(model: nn.Module, inputs: Mapping[str, Any]) -> Reference:
    """Run the unsharded model: forward, backward, one decode step, and forward with padding."""
    model.zero_grad()
    output = _seeded(model, inputs)
    gradients = None
    try:
        weighing_loss(output).backward()
        named = model.named_parameters()
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        # If every key is masked, some models have gradients that are not finite.
        gradients = {n: g for n, g in gradients.items() if g.isfinite().all()}
    except (RuntimeError, AssertionError):  # it overwrites what backward needs, or refuses
        pass
    model.zero_grad()
    try:
        decode = decode_step(model, inputs)
    except Exception:  # the model itself cannot decode
        decode = None
    try:
        padded = padded_logits(model, inputs)
    except Exception:  # the model itself cannot take padding
        padded = None
    return Reference(logits_of(output).detach(), gradients, decode, padded)


def _seeded(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model; random draws are the same each time, on all ranks."""
    torch.manual_seed(0)
    return model(**inputs)


def decode_step(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the last token's logits with a key-value cache for the rest; None without a cache."""
    if "use_cache" not in inputs:
        return None
    key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs[key]
    with torch.no_grad():
        first = _seeded(model, {**inputs, key: ids[:, :-1], "use_cache": True})
        cache = getattr(first, "past_key_values", None)
        if cache is None:
            return None
        rest = {**inputs, key: ids[:, -1:], "use_cache": True, "past_key_values": cache}
        return logits_of(_seeded(model, rest))


def padded_logits(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return logits with padding before all sequences but the first; None if it takes no masks."""
    masks = {name: torch.ones_like(mask) for name, mask in padding(model, inputs).items()}
    if not masks:
        return None
    for mask in masks.values():
        mask[1:, :PADDING] = 0
    with torch.no_grad():
        return logits_of(_seeded(model, {**inputs, **masks}))


def compare(
    whole: nn.Module,
    inputs: Mapping[str, Any],
    plan: Plan,
    mesh: Mesh,
    expected: Reference,
    loaded: nn.Module | None = None,
) -> Comparison:
    """Compare `loaded`, or else a split copy of `whole`, with what `whole` computed."""
    local = loaded or apply(copy.deepcopy(whole), plan, mesh)
    with count_collectives() as ahead:
        output = _seeded(local, inputs)
    with count_collectives() as back:
        if expected.gradients is not None:
            weighing_loss(output).backward()
    grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    frozen = {n for n, p in local.named_parameters() if not p.requires_grad}
    wanted = {n: g for n, g in (expected.gradients or {}).items() if n not in frozen}
    wrong = differences(full_tensors(local, grads), wanted)
    worst = max(wrong, key=lambda n: badness(wrong[n]), default="")
    want, step = expected.decode, None
    if want is not None:
        got = decode_step(local, inputs)
        step = math.nan if got is None else _largest(got - want)
    want, apart = expected.padded, None
    if want is not None:
        got = padded_logits(local, inputs)
        apart = math.nan if got is None else _apart(got, want)
    return Comparison(
        logits=_largest(logits_of(output).detach() - expected.logits),
        gradients=wrong.get(worst),
        worst=worst,
        decode=step,
        padded=apart,
        split=split_share(whole, local),
        forward=counts(ahead),
        backward=counts(back),
    )


def differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Map each parameter to its full gradient's difference, as a share of the largest entry."""
    largest = max(map(_largest, expected.values()), default=0.0)
    out = {}
    for name, want in expected.items():
        scale = max(_largest(want), FLOOR * largest) or 1.0
        got = found.get(name, torch.full_like(want, torch.nan))
        out[name] = _largest(got - want) / scale
    return out


def in_blocks(whole: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield names and parameters of the blocks: all but embeddings, heads and norms."""
    for name, parameter in whole.named_parameters():
        owner = whole.get_submodule(name.rpartition(".")[0])
        if not any(part.isdigit() for part in name.split(".")):
            continue
        if not isinstance(owner, nn.Embedding) and "norm" not in type(owner).__name__.lower():
            yield name, parameter


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; NaN if NaNs are not in the same places."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return math.nan
    return _largest((found - expected).nan_to_num(0.0))


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def split_share(whole: nn.Module, local: nn.Module) -> float:
    """Return the share of the block weights that no two ranks hold, given the split `local`."""
    mesh, layout = mesh_of(local), placements(local)
    coords: Coords = mesh.coords if mesh is not None else {"tp": (0, 1)}
    shapes = {name: placed.local_shape(coords) for name, placed in layout.items()}
    held = {name: math.prod(n or 0 for n in shape) for name, shape in shapes.items()}
    return share_split(whole, held, coords["tp"][1])


def share_split(whole: nn.Module, held: Mapping[str, int], ranks: int) -> float:
    """Return the share of the block weights (no embeddings, heads, norms) that no two ranks hold.

    `held` says how many elements of a parameter a rank has, if not all.
    """
    total = covered = 0.0
    for name, parameter in in_blocks(whole):
        size = parameter.numel()
        total += size
        if ranks > 1:
            covered += (size - held.get(name, size)) * ranks / (ranks - 1)
    return covered / total if total else 1.0
