"""Finds the transformers style for one module, from its placements in a plan.

A linear layer is sharded while it computes, or in memory only. Stacked experts are sharded within
each expert, and vectors of heads by heads. Torch can compute any other module with DTensors,
gathered.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.planner.contract.dims import Concat, dim_size, local_ranges, merged
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan, Plan

Table = dict[str, str]
"""Name of a module or parameter, with `*` for a layer number -> style."""

COLUMN, ROW = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
"""Styles of a linear layer with sharded outputs or inputs; the second of a pair gathers them."""
EXPERTS, SUMMED, LATENT = "moe_tp_experts", "replicated_with_grad_allreduce", "mla_kv_a_proj"
BY_TORCH, SECOND = "embedding_rowwise", "embedding_colwise"
"""Styles of an embedding. With them any module computes with DTensors and returns full tensors."""


class Choice(NamedTuple):
    """What a candidate table gathers, and which gradients it sums."""

    gathered: frozenset[str]
    """Patterns of modules whose linear layers are sharded in memory only."""
    plain: bool
    """Whether embeddings with several arguments are replicated: styles see the first argument."""
    by_torch: bool
    """Whether modules without a style compute with DTensors, sharded in memory only."""
    summed: bool
    """Whether gradients are summed in modules that see no sharded tensor. Colwise layers and
    experts after them sum the gradients of their inputs."""


class Subject(NamedTuple):
    """A module that needs a style."""

    plan: Plan
    spec: ModulePlan
    module: nn.Module
    whole: bool
    """Whether it takes and returns full tensors."""
    choice: Choice
    rotary: int | None
    """Width of the part of a latent that all heads share, if the config has one."""

    def styles(self) -> Table:
        """Return the styles of the module, under "", and of its direct parameters."""
        called = self.spec.takes or self.spec.inputs or isinstance(self.module, nn.Embedding)
        if not called:  # other code reads its parameters, and would get DTensors
            return {}
        kinds = [_linear, _embedding, _experts, _stacked, _others]
        if self.choice.by_torch:
            kinds.append(_by_torch)
        return next((found for kind in kinds if (found := kind(self)) is not None), {})


def _linear(at: Subject) -> Table | None:
    if not is_linear(at.module) or "weight" not in at.spec.parameters:
        return None
    weight = parse(at.spec.parameters["weight"].placement)
    dims = split_dims(weight)
    if dims == [0]:
        if not at.whole and _is_latent(at):
            return {"": LATENT}
        gathers = any(not split_dims(parse(change.target)) for change in at.spec.outputs)
        if at.whole or gathers:
            return {"": COLUMN[1]}
        if _contiguous(at.plan, weight, 0):
            return {"": COLUMN[0]}
        packed = getattr(at.module, "bias", None) is None and _contiguous(at.plan, weight, 0, 2)
        return {"": "packed_colwise" if packed else COLUMN[1]}
    if dims == [1]:
        cut = at.whole or bool(at.spec.inputs) or not _contiguous(at.plan, weight, 1)
        return {"": ROW[1] if cut else ROW[0]}
    return {"": LATENT} if _is_latent(at) and not at.whole else None


def _is_latent(at: Subject) -> bool:
    """Return whether all heads share the last part of the output, whose gradient is Partial."""
    for change in at.spec.outputs:
        width = parse(change.source).dims[-1]
        last = width.terms[-1] if isinstance(width, Concat) else None
        if last is not None and at.rotary == dim_size(last) and parse(change.target).grad_partial:
            return True
    return False


def _embedding(at: Subject) -> Table | None:
    if not isinstance(at.module, nn.Embedding):
        return None
    if at.choice.plain and len(inspect.signature(at.module.forward).parameters) > 1:
        return {}
    dims = split_dims(parse(at.spec.parameters["weight"].placement))
    return {"": BY_TORCH if dims == [0] else SECOND} if dims else {}


def _experts(at: Subject) -> Table | None:
    """Style stacked experts with one tensor per product: sharded within each expert."""
    shapes = {n: tuple(p.shape) for n, p in at.module.named_parameters(recurse=False)}
    up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
    if len(shapes) != 2 or up is None or down is None or len(up) != 3:
        return None
    if up == (down[0], 2 * down[2], down[1]):
        cut = {"gate_up_proj": "packed_colwise", "down_proj": ROW[0], "": EXPERTS}
    elif up == (down[0], down[2], 2 * down[1]):
        cut = {"gate_up_proj": "packed_rowwise", "down_proj": COLUMN[0], "": EXPERTS}
    else:
        return None
    return cut if split_dims(parse(at.spec.parameters["down_proj"].placement)) else {}


def _stacked(at: Subject) -> Table | None:
    """Style other experts as the plan shards them: each rank has a part of every expert."""
    cut: Table = {}
    stacks = 0
    for name, entry in at.spec.parameters.items():
        placed = parse(entry.placement)
        dims, ndim = split_dims(placed), len(placed.dims)
        if not dims:
            continue
        pair = {ndim - 2: ("colwise", "packed_colwise"), ndim - 1: ("rowwise", "packed_rowwise")}
        fitting = [
            style
            for parts, style in enumerate(pair.get(dims[0], ()), 1)
            if len(dims) == 1 and _contiguous(at.plan, placed, dims[0], parts)
        ]
        if not fitting:
            return None
        cut[name] = fitting[0]
        stacks += ndim == 3
    return {**cut, "": EXPERTS} if stacks > 1 else None


def _others(at: Subject) -> Table | None:
    """Style sharded vectors, and replicated parameters whose gradients are sums."""
    if at.whole:
        return None
    placed = {n: parse(p.placement) for n, p in at.spec.parameters.items() if _is_vector(at, n)}
    cut = {n: COLUMN[0] for n, p in placed.items() if split_dims(p) and _contiguous(at.plan, p, 0)}
    if cut:
        return {**cut, "": "local_params"}
    uses = (parse(p.use) for p in at.spec.parameters.values() if p.use is not None)
    summed = any(use.grad_partial for use in uses) and (at.choice.summed or _sees_parts(at.spec))
    return {"": SUMMED} if summed else None


def _by_torch(at: Subject) -> Table | None:
    """Style any other module with matrices; all of its parameters become DTensors."""
    own = dict(at.module.named_parameters(recurse=False))
    dims = {n: split_dims(parse(p.placement)) for n, p in at.spec.parameters.items()}
    cut = [n for n in own if dims.get(n) and own[n].dim() > 1]
    if not cut or any(p.dim() == 0 for p in own.values()):
        return None
    ways = {name: _along(p.dim(), (dims.get(name) or [0])[0]) for name, p in own.items()}
    return {n: way for n, way in ways.items() if way != BY_TORCH} | {"": BY_TORCH}


def _along(ndim: int, dim: int) -> str:
    """Return the style that shards dim `dim` of a parameter of `ndim` dims."""
    styles = {ndim - 1: ROW[0], ndim - 2: COLUMN[0], 1: SECOND, 0: BY_TORCH}
    return styles.get(dim, BY_TORCH)


def _sees_parts(spec: ModulePlan) -> bool:
    """Return whether any input or output of a module is sharded."""
    lie = [placed.placement for placed in (*spec.takes, *spec.gives)]
    return any(split_dims(parse(p)) for p in (*lie, *(c.source for c in spec.outputs)))


def _is_vector(at: Subject, name: str) -> bool:
    found = at.module._parameters.get(name)
    return isinstance(found, Tensor) and found.dim() == 1


def is_linear(module: Any) -> bool:
    """Return whether transformers treats a module as a linear layer."""
    weight = getattr(module, "weight", None)
    sizes = [getattr(module, n, None) for n in ("out_features", "in_features")]
    return isinstance(weight, Tensor) and list(weight.shape) == sizes


def split_dims(placement: Placement) -> list[int]:
    """Return the sharded dims of a tensor."""
    replicated = placement.replicated().dims
    return [d for d, dim in enumerate(placement.dims) if dim != replicated[d]]


def _contiguous(plan: Plan, placed: Placement, dim: int, parts: int = 1) -> bool:
    """Return whether each rank holds the same chunks of the dim's equal `parts` as in torch."""
    size, ranks = placed.shape[dim] or 0, plan.mesh["tp"]
    if size % parts:
        return False
    share = -(-size // parts // ranks)
    for rank in range(plan.world_size):
        at = plan.coords(rank)["tp"][0]
        want = [
            (start + min(at * share, size // parts), start + min((at + 1) * share, size // parts))
            for start in range(0, size, size // parts)
        ]
        if merged(want) != local_ranges(placed.dims[dim], plan.coords(rank)):
            return False
    return True
