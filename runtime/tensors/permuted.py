"""Transposes of DTensors that are `Arranged`: the same parts, with their dims in another order.

So such a view shares its memory with what it is a view of, and may be written to, as Muon does to
the gradients of tall matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.tensors.arranged import Arranged


def order_of(schema: OpSchema) -> list[int] | None:
    """Which dim of the operand each dim of the result is; None for an op that does more."""
    operand: Any = schema.args_schema[0] if schema.args_schema else None
    if not isinstance(operand, DTensorSpec):
        return None
    aten, dims, given = torch.ops.aten, operand.ndim, [*range(operand.ndim)]
    if schema.op == aten.permute.default:
        wanted: Any = schema.args_schema[1]
        return [d % dims for d in wanted]
    if schema.op == aten.t.default:
        return given[::-1]
    if schema.op == aten.transpose.int and dims:
        one, other = (int(d) % dims for d in schema.args_schema[1:3])  # type: ignore[arg-type]
        given[one], given[other] = other, one
        return given
    return None


def permuted(out: OutputSharding, schema: OpSchema, order: list[int]) -> OutputSharding:
    """`out`, of plain shards, of an op that orders the dims of an arranged tensor so."""
    operand: Any = schema.args_schema[0]
    made: Any = out.output_spec
    placements = list(made.placements)
    for i, placement in enumerate(operand.placements):
        if isinstance(placement, Arranged):
            dim = order.index(placement.dim)
            assert placements[i] == Shard(dim), "torch keeps what is split there"
            dims = parse(placement.layout).dims
            layout = str(Placement(tuple(dims[d] for d in order)))
            placements[i] = Arranged(dim, layout, placement.shared, placement.whole_over)
    out.output_spec = DTensorSpec(made.mesh, tuple(placements), tensor_meta=made.tensor_meta)
    return out
