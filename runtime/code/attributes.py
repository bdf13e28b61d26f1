"""Sets integers that a module's code reads to their local values: `num_heads`, `config.x`."""

from __future__ import annotations

import copy
from inspect import isroutine
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import dim_size
from shardwright.planner.contract.notation import parse
from shardwright.runtime.communication.mesh import Mesh

PREFIX = "_shardwright"
"""Of attributes that splitting adds to a module."""


def size_attributes(module: nn.Module) -> tuple[str, ...]:
    """The attributes of torch's own layers that have the sizes of the dims of the weight."""
    if isinstance(module, nn.Linear):
        return "out_features", "in_features"
    return ("num_embeddings", "embedding_dim") if isinstance(module, nn.Embedding) else ()


def set_local(module: nn.Module, path: str, dim: str, mesh: Mesh) -> None:
    """Set attribute `path` of `module` to the local size of `dim`.

    Objects on the path (a config, a list of sizes) are copied first, as other modules share them.

    Raises:
        PlanError: there is no such attribute, or its value is not the full size of `dim`.
    """
    (parsed,) = parse(dim).dims
    whole, local = dim_size(parsed), dim_size(parsed, mesh.coords)
    if whole is None or local is None:
        raise PlanError(f"attribute '{path}' cannot be set to '{dim}', a size not known yet")
    _replaced(module, path.split("."), (whole, local), path)


def _replaced(owner: Any, keys: list[str], sizes: tuple[int, int], path: str) -> Any:
    """Return `owner` with the integer at `keys` replaced: the first of two sizes by the second."""
    old, new = sizes
    if not keys:
        if isinstance(owner, bool) or not isinstance(owner, int):
            kind = type(owner).__name__
            raise PlanError(f"attribute '{path}' is a {kind}: a plan may replace plain sizes only")
        if owner != old:
            raise PlanError(f"attribute '{path}' is {owner}; the plan is for {old}")
        return new
    key, rest = keys[0], keys[1:]
    if isinstance(owner, (list, tuple)):
        items = [
            _replaced(v, rest, sizes, path) if str(i) == key else v for i, v in enumerate(owner)
        ]
        return type(owner)(*items) if hasattr(owner, "_fields") else type(owner)(items)
    try:
        if key.startswith("__") or isinstance(owner, type) or isroutine(owner):
            raise AttributeError  # not an attribute of the model
        child = _replaced(getattr(owner, key), rest, sizes, path)
        if not isinstance(owner, nn.Module):
            owner = copy.copy(owner)
        setattr(owner, key, child)
    except (AttributeError, TypeError):
        kind = type(owner).__name__
        raise PlanError(f"there is no attribute '{path}' of {kind} that can be set") from None
    return owner
