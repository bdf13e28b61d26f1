"""Which of torch's rules for DTensors are relied on; all else is done on whole tensors.

Torch has rules for some thousand ops, and not all are right: a loss that is a mean counts the
elements of a part, a mean of uneven parts counts these alike, a sum along no dims adds up none of
them. What goes element by element, views, sums and products of matrices are what optimizers, norms
and penalties are made of, and were tried (`tests/runtime/test_relied_on.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from shardwright.errors import UsageError
from shardwright.runtime.tensors.schemas import (
    Propagate,
    by_way_of,
    gathered,
    gives_view,
    mapped,
    writes,
)
from shardwright.runtime.tensors.written_views import INSTEAD

RULES = frozenset(
    "sum mean linalg_vector_norm any all equal _local_scalar_dense mm bmm addmm baddbmm dot cat "
    "stack _to_copy empty_like zeros_like ones_like full_like new_empty new_empty_strided "
    "new_zeros new_ones new_full is_same_size".split()
)
"""Ops by name whose rules are relied on; so are those of ops with a tag that says "pointwise"."""

WRITING = frozenset(
    "copy_ fill_ zero_ detach_ squeeze_ _amp_foreach_non_finite_check_and_unscale_".split()
)
"""The same of those that write to what they are given."""


def by_rules_relied_on(torch_s: Propagate, schema: OpSchema) -> OutputSharding:
    """How an op goes: as torch says where that is relied on, else on whole tensors.

    Raises:
        UsageError: it is not relied on, and writes to what it is given.
    """
    whole = mapped(schema, gathered)
    if whole is schema:
        return torch_s(schema)
    if writes(schema.op):
        if not _is_relied_on(schema.op):
            raise UsageError(
                f"{schema.op} writes to a parameter or gradient of a split model, of which a rank "
                f"has a part: {INSTEAD}"
            )
        return torch_s(schema)
    if _is_relied_on(schema.op) and not _along_none(schema):
        try:
            out = torch_s(schema)
        except RuntimeError:  # a view across uneven parts, say
            out = None
        if out is not None and not _averages_uneven(schema, out):
            return out
    return by_way_of(torch_s, whole)


@cache
def _is_relied_on(op: Any) -> bool:
    name = op._schema.name.partition("::")[2]
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return True
    if writes(op):
        return name in WRITING or _goes_by_element(name.removesuffix("_"))
    return gives_view(op) or name in RULES or torch.Tag.pointwise in op.tags


def _goes_by_element(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    made = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in op.tags for op in made)


def _along_none(schema: OpSchema) -> bool:
    """Whether it reduces along no dims by name, which means all."""
    return any(isinstance(value, (list, tuple)) and not value for value in schema.args_schema)


def _averages_uneven(schema: OpSchema, out: OutputSharding) -> bool:
    """Whether ranks whose parts differ in size would count alike in a mean."""
    made: Any = out.output_spec
    made = made if isinstance(made, (list, tuple)) else [made]
    pending = {
        i
        for spec in made
        if isinstance(spec, DTensorSpec)
        for i, p in enumerate(spec.placements)
        if isinstance(p, Partial) and p.reduce_op == "avg"
    }
    given: Any = (out.redistribute_schema or schema).args_spec if pending else ()
    return any(
        spec.shape[spec.placements[i].dim] % spec.mesh.size(i)
        for spec in given
        for i in pending
        if spec.placements[i].is_shard()
    )
