"""Sums that torch leaves pending, and that code goes on with as if they were there.

torch lets `item()` of a DTensor give this rank's term of a sum, and a norm along some dims be
pending, which code then changes in place (as Adafactor does), where torch does not add it up any
more. So the first is added up, on all ranks; and ranks trade parts for such a norm, each to have
whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

aten = torch.ops.aten


def settled(torch_s: Callable[[OpSchema], OutputSharding], schema: OpSchema) -> OutputSharding:
    """How an op goes as torch has it, or else on what leaves nothing pending."""
    given = schema.args_schema[0] if schema.args_schema else None
    if not isinstance(given, DTensorSpec):
        return torch_s(schema)
    wanted = given.placements
    if schema.op is aten._local_scalar_dense.default:
        wanted = (Replicate(),) * len(wanted)
    elif schema.op is aten.linalg_vector_norm.default:
        wanted = _off(_normed(schema, given), given)
    if wanted == given.placements:
        return torch_s(schema)
    moved = DTensorSpec(given.mesh, wanted, tensor_meta=given.tensor_meta)
    changed = OpSchema(
        schema.op, (moved, *schema.args_schema[1:]), schema.kwargs_schema, schema.schema_info
    )
    out = torch_s(changed)
    out.redistribute_schema, out.needs_redistribute = changed, True
    return out


def _normed(schema: OpSchema, given: DTensorSpec) -> set[int]:
    """The dims that a norm is taken along, where these are some."""
    dims: Any = schema.args_schema[2] if len(schema.args_schema) > 2 else None
    dims = [dims] if isinstance(dims, int) else dims or []
    return {d % given.ndim for d in dims} if given.ndim else set()


def _off(dims: set[int], given: DTensorSpec) -> tuple[Any, ...]:
    """`given` with what splits `dims` splitting another dim."""
    other = next((d for d in range(given.ndim) if d not in dims), None)
    if other is None:
        return given.placements
    placed: tuple[Any, ...] = given.placements
    return tuple(Shard(other) if p.is_shard() and p.dim in dims else p for p in placed)
