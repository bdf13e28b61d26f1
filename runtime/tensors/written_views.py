"""Views of DTensors that are copies: what is written to them in place would be lost.

Of a view that goes across the ranks' parts (a row of a weight that is split by rows) torch gathers
the tensor first, so that what it gives is right to read, and shares no memory with the parameter.
Such a view says so by its placement, `CopiedView`, which all views of it keep and what is computed
of it does not have.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from shardwright.errors import UsageError
from shardwright.runtime.tensors.schemas import (
    Propagate,
    by_way_of,
    gathered,
    gives_view,
    is_whole,
    mapped,
    writes,
)

INSTEAD = (
    "change the whole, w = shardwright.full_tensors(model, {name: p})[name], and put it back by "
    "p.copy_(shardwright.split_tensors(model, {name: w})[name]) under torch.no_grad()"
)


class CopiedView(Replicate):
    """Replicate, of a view that shares no memory with what it is a view of."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CopiedView)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, CopiedView)

    def __hash__(self) -> int:
        return -7


@cache
def watch_views() -> None:
    """From now on, what is computed with outside of ops is as torch knows it."""
    for name in ("redistribute", "to_local"):
        setattr(DTensor, name, _of_plain(getattr(DTensor, name)))


def _of_plain(method: Any) -> Any:
    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self.clone() if is_copied(self._spec) else self, *args, **kwargs)

    plain.__doc__, plain.__name__ = method.__doc__, method.__name__
    return plain


def is_copied(spec: DTensorSpec) -> bool:
    """Whether it is of a view that is a copy."""
    return any(isinstance(p, CopiedView) for p in spec.placements)


def as_torch_s(spec: DTensorSpec) -> DTensorSpec:
    """`spec` as torch knows it."""
    if not is_copied(spec):
        return spec
    placements = (Replicate() if isinstance(p, CopiedView) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def written(rules: Propagate, schema: OpSchema) -> OutputSharding:
    """How an op goes by `rules`, and whether what it gives is a view that is a copy.

    Raises:
        UsageError: it writes to one, or torch knows nothing of the op.
    """
    plain = mapped(schema, as_torch_s)
    if plain is not schema:
        _check_written(schema)
    out = _by(rules, plain)
    if not gives_view(schema.op):
        return out
    given: Any = schema.args_schema[0]
    if not isinstance(given, DTensorSpec):
        return out
    own = as_torch_s(given).placements
    wanted = own if out.redistribute_schema is None else _placed(out.redistribute_schema)
    if wanted == own and not is_copied(given):
        return out
    whole = mapped(plain, gathered)
    if wanted not in (own, _placed(whole)):
        out = by_way_of(rules, whole)  # a part of it stays split: all of it is gathered, to say so
    made: Any = out.output_spec
    several = isinstance(made, (list, tuple))
    out.output_spec = type(made)(map(_copied, made)) if several else _copied(made)
    return out


def _by(rules: Propagate, schema: OpSchema) -> OutputSharding:
    """What `rules` say.

    Raises:
        UsageError: nothing, and the op is not made of others that they may know; or it makes a
            whole tensor where a part should be.
    """
    made = schema.kwargs_schema.get("out")
    if isinstance(made, DTensorSpec) and not schema.args_spec and not is_whole(made):
        raise UsageError(f"{schema.op} makes a whole tensor of a part: {INSTEAD}")
    try:
        return rules(schema)
    except NotImplementedError:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch._C._dispatch_has_kernel_for_dispatch_key(schema.op.name(), key):
            raise  # torch goes on with those
        raise UsageError(
            f"{schema.op} of a parameter or gradient of a split model, of which a rank has a part, "
            f"and for which torch has no rule: {INSTEAD}"
        ) from None


def _placed(schema: OpSchema) -> Any:
    first: Any = schema.args_schema[0]
    return first.placements


def _check_written(schema: OpSchema) -> None:
    for i in writes(schema.op):
        value: Any = schema.args_schema[i] if i < len(schema.args_schema) else None
        every = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(s, DTensorSpec) and is_copied(s) for s in every):
            refuse_writing(schema.op)


def refuse_writing(op: Any) -> NoReturn:
    """Raise: `op` writes to a view that is a copy."""
    raise UsageError(
        f"{op} writes to a view (rows, a reshape) of a parameter or gradient of a split model, of "
        "which a rank has a part, so that the view is a copy, and what is written would be lost: "
        f"{INSTEAD}"
    )


def _copied(spec: DTensorSpec) -> DTensorSpec:
    placements = (CopiedView() if p.is_replicate() else p for p in spec.placements)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
