"""Pickles split models (also for `torch.save`): each rank writes its own shards.

A pickle has the unsplit model on meta, its plan, and this rank's local tensors. Reading it splits
the model again and puts in the local tensors. The mesh is the former one if this process still has
it, otherwise a new one of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.boundary.hooks import is_hooked
from shardwright.runtime.boundary.module_boundary import placements
from shardwright.runtime.code.attributes import PREFIX, set_whole
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.communication.processes import meet
from shardwright.runtime.communication.replicas import average_gradients
from shardwright.runtime.modules.parameters import distribute

TIMEOUT = 600.0
"""Seconds that ranks wait for each other when a mesh is made."""

_names: WeakKeyDictionary[Mesh, str] = WeakKeyDictionary()
"""The meshes of models that this process has written, with unique names."""


class WrittenBy(NamedTuple):
    """Where a model was written: the name of its mesh, the global rank, and its coordinates."""

    mesh: str
    rank: int
    coords: Coords


@dataclass(frozen=True)
class Recipe:
    """How a model was split.

    Attributes:
        plan: Its plan.
        classes: The original classes of its modules, by name.
        split: Splits an unsplit model in place, given its plan and a mesh; returns a mesh that also
            has groups for sub-axes.
    """

    plan: Plan
    classes: dict[str, type]
    split: Callable[[Any, Plan, Mesh], Mesh]

    def reduced(self, model: Any) -> tuple[Any, ...]:
        """The result of `__reduce__` for a split `model`.

        Raises:
            UsageError: the model was changed after it was split, or has hooks.
        """
        _check(model)
        mesh: Mesh = model._shardwright_mesh
        name = _names.setdefault(mesh, uuid4().hex)
        place = WrittenBy(name, dist.get_rank(), mesh.coords)
        unsplit = _unsplit(model, self)
        return _read, (self.split, unsplit, self.plan.to_json(), _parts(model), place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self


def _check(model: Any) -> None:
    """Check that a model has not changed since it was split, and has no hooks.

    Raises:
        UsageError: it has.
    """
    shared = model._shardwright.model
    before = None if shared.changes is None else shared.changes.classes
    changed = {path: type(m) for path, m in model.named_modules()} != before
    if changed or not all(shared.has(p) for p in model.parameters()):
        raise UsageError(
            f"this {type(model).__name__} cannot be pickled: modules of it were changed after it "
            "was split: write it whole with shardwright.save(model, directory)"
        )
    if hooked := [path for path, m in model.named_modules() if is_hooked(m)]:
        raise UsageError(
            f"this {type(model).__name__} cannot be pickled, as '{hooked[0]}' has hooks: remove "
            "them, or write it whole with shardwright.save(model, directory)"
        )


def _parts(model: Any) -> dict[str, Tensor]:
    """The local tensors of parameters and sharded buffers, by name, without unused memory."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    placed = placements(model)
    return {
        name: _alone((x._local_tensor if isinstance(x, DTensor) else x).detach())
        for name, x in named.items()
        if isinstance(x, DTensor) or name in placed
    }


def _alone(x: Tensor) -> Tensor:
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _unsplit(model: Any, recipe: Recipe) -> nn.Module:
    """The unsplit model: on meta, except tensors that are full on all ranks."""
    modules, placed = dict(model.named_modules()), placements(model)
    memo: dict[int, Any] = {id(m): object.__new__(recipe.classes[n]) for n, m in modules.items()}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(x, DTensor) or name in placed:
            shape: Any = x.shape if isinstance(x, DTensor) else placed[name].shape
            memo[id(x)] = torch.empty(shape, dtype=x.dtype, device="meta")
            if isinstance(x, nn.Parameter):
                memo[id(x)] = nn.Parameter(memo[id(x)], requires_grad=x.requires_grad)
        else:
            memo[id(x)] = x
    for path, module in modules.items():
        own = {k: v for k, v in vars(module).items() if not k.startswith(PREFIX)}
        new = memo[id(module)]
        vars(new).update(copy.deepcopy(own, memo))
        spec = recipe.plan.module(path)
        for attribute, dim in spec.attributes.items() if spec else ():
            set_whole(new, attribute, dim, model._shardwright_mesh)
    return memo[id(model)]


def _read(
    split: Any, model: nn.Module, plan_json: str, parts: dict[str, Tensor], place: WrittenBy
) -> nn.Module:
    """Rebuild a split model from a pickle.

    Raises:
        UsageError: another rank wrote it.
    """
    plan = Plan.from_json(plan_json)
    mesh = next((m for m, name in _names.items() if name == place.mesh and _is_there(m)), None)
    if mesh is None:
        _, mesh = meet(plan, None, next(iter(parts.values())).device, TIMEOUT)
    mesh = split(model, plan, mesh)
    if mesh.coords != place.coords or dist.get_rank() != place.rank:
        raise UsageError(
            f"this is the part of a {type(model).__name__} that rank {place.rank} wrote, and this "
            f"is rank {dist.get_rank()}: let each rank read its own file"
        )
    _put(model, parts)
    distribute(model, mesh)
    average_gradients(model, {name: mesh[name] for name in plan.batch_dims})
    return model


def _is_there(mesh: Mesh) -> bool:
    """Whether the process groups of `mesh` still exist."""
    groups = [group.pg for group in mesh.groups.values() if group.pg is not None]
    try:
        return all(dist.get_process_group_ranks(pg) for pg in groups)
    except (KeyError, ValueError):
        return False


def _put(model: nn.Module, parts: dict[str, Tensor]) -> None:
    """Replace meta tensors by local ones; tied tensors are replaced at each place."""
    new: dict[int, Tensor] = {}
    for name, old in (*model.named_parameters(), *model.named_buffers()):
        if name in parts:
            part = parts[name]
            if isinstance(old, nn.Parameter):
                part = nn.Parameter(part, requires_grad=old.requires_grad)
            vars(part).update(vars(old))
            new[id(old)] = part
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            home.update({n: new[id(x)] for n, x in home.items() if id(x) in new})  # type: ignore[arg-type]
