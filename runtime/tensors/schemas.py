"""What ops are given, as torch's rules for DTensors see it: laid out, written to, viewed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

Propagate = Callable[[OpSchema], OutputSharding]
"""How an op goes."""


def mapped(schema: OpSchema, change: Callable[[DTensorSpec], DTensorSpec]) -> OpSchema:
    """`schema` with `change` of each tensor; itself where that changes none."""
    changed = False

    def one(value: Any) -> Any:
        nonlocal changed
        if isinstance(value, (list, tuple)):
            return type(value)(map(one, value))
        if not isinstance(value, DTensorSpec):
            return value
        new = change(value)
        changed = changed or new is not value
        return new

    args = tuple(map(one, schema.args_schema))
    kwargs = {name: one(value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, args, kwargs, schema.schema_info) if changed else schema


def is_whole(spec: DTensorSpec) -> bool:
    """Whether each rank has all of it."""
    return all(p.is_replicate() for p in spec.placements)


def gathered(spec: DTensorSpec) -> DTensorSpec:
    """`spec` of a tensor that is whole on each rank; itself where it is."""
    if is_whole(spec):
        return spec
    every = (Replicate(),) * len(spec.placements)
    return DTensorSpec(spec.mesh, every, tensor_meta=spec.tensor_meta)


def by_way_of(rules: Propagate, schema: OpSchema) -> OutputSharding:
    """How an op goes by `rules` on what it is given once that is laid out as in `schema`."""
    out = rules(schema)
    out.redistribute_schema = out.redistribute_schema or schema
    out.needs_redistribute = True
    return out


@cache
def writes(op: Any) -> list[int]:
    """The numbers of the arguments that an op writes to."""
    given = [a.alias_info for a in op._schema.arguments]
    return [i for i, alias in enumerate(given) if alias is not None and alias.is_write]


@cache
def gives_view(op: Any) -> bool:
    """Whether what an op gives is a view of what it is given."""
    returned = [r.alias_info for r in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)
