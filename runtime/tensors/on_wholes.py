"""Ops on DTensors that each rank does on whole tensors: it keeps its part of what is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.runtime.tensors.schemas import writes
from shardwright.runtime.tensors.written_views import is_copied, refuse_writing


def on_wholes(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `op` gives on whole tensors; what has the shape of the first is laid out as that.

    All ranks call it. What is written without being read is not gathered.

    Raises:
        UsageError: it would write to a view that is a copy.
    """
    first = first_of(args, kwargs)
    written = [*_written(op, args, kwargs)]
    if any(is_copied(part._spec) for part in written):
        refuse_writing(op)
    wholes = {id(part): _room_for(part) for part in written if not _reads(op)}

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor) and id(value) not in wholes:
            read: Any = value.detach()
            wholes[id(value)] = read.full_tensor()
        return wholes.get(id(value), value)

    own, named = tree_map(whole, (tuple(args), dict(kwargs)))
    made = op(*own, **named)
    given = {id(wholes[id(part)]): part for part in written}
    for part in written:
        part._local_tensor.copy_(_part(wholes[id(part)], part)._local_tensor)

    def shown(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else _part(value, first)

    return tree_map(shown, made)


def first_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """The first DTensor that an op is given."""
    return next(t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor))


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[DTensor]:
    """The DTensors that `op` writes to."""
    for i in writes(op):
        value = args[i] if i < len(args) else kwargs.get(op._schema.arguments[i].name)
        if isinstance(value, DTensor):
            yield value


def _reads(op: Any) -> bool:
    """Whether `op` reads what it writes."""
    return "rrelu" in op._schema.name


def _room_for(part: DTensor) -> Tensor:
    """Room for the whole of what is written."""
    local = part._local_tensor
    return torch.empty_strided(part.shape, part.stride(), dtype=local.dtype, device=local.device)


def _part(whole: Tensor, like: DTensor) -> DTensor:
    """The DTensor of a `whole` tensor: laid out as `like`, where it has its shape."""
    mesh = like.device_mesh
    everywhere = (Replicate(),) * mesh.ndim
    out = DTensor.from_local(whole, mesh, everywhere, run_check=False)
    if whole.shape != like.shape or any(p.is_partial() for p in like.placements):
        return out
    return out.redistribute(placements=like.placements)
