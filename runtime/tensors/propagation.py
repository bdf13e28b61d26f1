"""How ops go on DTensors that are `Arranged`: torch's rules, and where they are not right.

Torch takes the parts for those that `torch.chunk` makes. For what goes element by element, or sums
over elements, that is as good, so its rules are asked about plain shards. For all else it is not:
torch is made to gather the whole first, in its order, or it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from shardwright.errors import UsageError
from shardwright.runtime.tensors.arranged import Arranged
from shardwright.runtime.tensors.pending import settled
from shardwright.runtime.tensors.permuted import order_of, permuted
from shardwright.runtime.tensors.relied_on import by_rules_relied_on
from shardwright.runtime.tensors.schemas import Propagate, by_way_of
from shardwright.runtime.tensors.written_views import as_torch_s, watch_views, written


@cache
def watch_propagation() -> None:
    """From now on, whenever torch settles how an op or a redistribution goes, see that it is right.

    It asks once for each op and layout, so that a step is no slower.
    """
    steps = partial(redistribution, _redistribute._gen_transform_infos_non_cached)
    _redistribute._gen_transform_infos_non_cached = steps
    torch_s: Any = DTensor._op_dispatcher.sharding_propagator
    rules = partial(settled, torch_s.propagate_op_sharding_non_cached)
    rules = partial(by_rules_relied_on, rules)
    watched = partial(written, partial(propagate, rules))
    watch_views()
    torch_s.propagate_op_sharding_non_cached = watched
    torch_s.propagate_op_sharding = type(torch_s.propagate_op_sharding)(watched)


def propagate(torch_s: Propagate, schema: OpSchema) -> OutputSharding:
    """How an op goes: as torch says where that is right, else on what was gathered.

    Raises:
        UsageError: it cannot be, since the op changes one of the tensors in place.
    """
    held = [_arrangement(column) for column in _columns(schema)]
    if not any(held):
        return torch_s(schema)
    plain = _mapped(schema, lambda spec, _: _as_shards(spec))
    if (order := order_of(schema)) is not None:
        return permuted(torch_s(plain), schema, order)
    out = _nested(torch_s(plain), plain)
    wrong = _wrong(out, schema, held)
    if not wrong:
        return _as_held(out, held)
    in_keywords = any(isinstance(s, DTensorSpec) for s in tree_leaves(schema.kwargs_schema))
    if not (in_keywords or schema.is_inplace_op() or schema.is_out_variant_op()):
        whole = _mapped(plain, lambda spec, i: _whole(spec, held[i]) if i in wrong else spec)
        out = by_way_of(lambda asked: _nested(torch_s(asked), asked), whole)
        rest = [None if i in wrong else at for i, at in enumerate(held)]
        given = out.redistribute_schema or whole
        taken = [(s, held[i]) for i in wrong for s in _columns(given)[i]]
        if all(_is_whole(s, at) for s, at in taken) and not _wrong(out, schema, rest):
            return _as_held(out, rest)
    layout = next(a.layout for at in held if at for a in at.dims.values())
    raise UsageError(
        f"{schema.op} on a tensor laid out as '{layout}' with one that lies otherwise: take both "
        "whole with shardwright.full_tensors(model, {name: tensor})"
    )


def _nested(out: OutputSharding, schema: OpSchema) -> OutputSharding:
    """`out` with tensors in lists where `schema` has lists: torch unpacks some."""
    wanted, given = out.redistribute_schema, schema.args_schema
    if wanted is not None and len(wanted.args_schema) != len(given):
        args = tree_unflatten(tree_leaves(wanted.args_schema), tree_structure(given))
        out.redistribute_schema = OpSchema(
            wanted.op, args, wanted.kwargs_schema, wanted.schema_info or schema.schema_info
        )
    return out


def redistribution(
    torch_s: Callable[..., list[Any]], source: DTensorSpec, target: DTensorSpec, *how: Any
) -> list[Any]:
    """The steps from one layout to another: torch's, by way of the whole from or to `Arranged`."""
    source, target = as_torch_s(source), as_torch_s(target)
    ends = [e for e in zip(source.placements, target.placements, strict=True) if _is_arranged(*e)]
    if not ends:
        return torch_s(source, target, *how)
    if not all(a == b or a.is_replicate() or b.is_replicate() for a, b in ends):
        gathered = (Replicate(),) * len(source.placements)
        whole = DTensorSpec(source.mesh, gathered, tensor_meta=source.tensor_meta)
        there = redistribution(torch_s, source, whole, *how)
        return there + redistribution(torch_s, whole, target, *how)
    held, split = _dims(target) | _dims(source), {*_dims(source)}
    out = []
    for step in torch_s(_as_shards(source), _as_shards(target), *how):
        out.append(_in_order(step, held, split))
        split ^= {step.mesh_dim} & held.keys()
    return out


def _is_arranged(*placements: Any) -> bool:
    return any(isinstance(p, Arranged) for p in placements)


def _in_order(step: Any, held: dict[int, Arranged], split: set[int]) -> Any:
    """A step of plain shards as one of those that are arranged, of a tensor that is now `split`."""
    own = held.get(step.mesh_dim)
    if own is None:
        return step
    whole_over = tuple(i for i in held if i not in split and i != step.mesh_dim)
    now = Arranged(own.dim, own.layout, own.shared, whole_over)
    ends = (now if p == Shard(own.dim) else p for p in step.src_dst_placements)
    return replace(step, src_dst_placements=tuple(ends))


class Arrangement(NamedTuple):
    """Which mesh dims split tensors of one shape in an order of their own."""

    shape: torch.Size
    dims: dict[int, Arranged]


def _columns(schema: OpSchema) -> list[list[DTensorSpec]]:
    """The tensors that an op takes together: all, or those at one place of its lists."""
    given = [*schema.args_schema, *schema.kwargs_schema.values()]
    alone = [s for s in given if isinstance(s, DTensorSpec)]
    lists = [s for s in given if isinstance(s, (list, tuple)) and _tensors(s)]
    size = max((len(s) for s in lists), default=0)
    return [
        alone + [s[i] for s in lists if i < len(s) and isinstance(s[i], DTensorSpec)]
        for i in range(max(size, 1))
    ]


def _tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, DTensorSpec) for value in values)


def _arrangement(column: list[DTensorSpec]) -> Arrangement | None:
    for spec in column:
        if dims := _dims(spec):
            return Arrangement(spec.shape, dims)
    return None


def _dims(spec: DTensorSpec) -> dict[int, Arranged]:
    return {i: p for i, p in enumerate(spec.placements) if isinstance(p, Arranged)}


Held = list["Arrangement | None"]
"""What is arranged in each column of an op."""


def _wrong(out: OutputSharding, schema: OpSchema, held: Held) -> set[int]:
    """The columns for which `out` is not right as it is."""
    results = _results(out, len(held))
    if out.use_val_from_redistribute_schema or len(held) not in (1, len(results)):
        return {i for i, at in enumerate(held) if at}  # sizes of parts as torch would make them
    given, wanted = _columns(schema), _columns(out.redistribute_schema or schema)
    wrong = set()
    for i, at in enumerate(held):
        made = results if len(held) == 1 else [results[i]]
        follow = [_as_shards(s) for s in [*wanted[i], *made] if s is not None]
        if at and not (
            all(_alike(s, at) for s in given[i]) and all(_follows(s, at) for s in follow)
        ):
            wrong.add(i)
    return wrong


def _as_held(out: OutputSharding, held: Held) -> OutputSharding:
    """`out` with what torch has as shards arranged."""
    results = _results(out, len(held))
    columns = held if len(held) == len(results) else held[:1] * len(results)
    made = [s and _arranged(s, at) for s, at in zip(results, columns, strict=True)]
    given: Any = out.output_spec
    if given is not None:
        out.output_spec = type(given)(made) if isinstance(given, (list, tuple)) else made[0]
    if out.redistribute_schema is not None:
        out.redistribute_schema = _mapped(
            out.redistribute_schema, lambda spec, i: _arranged(spec, held[i])
        )
    return out


def _results(out: OutputSharding, columns: int) -> list[DTensorSpec | None]:
    given: Any = out.output_spec
    if given is None:
        return [None] * columns
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _alike(spec: DTensorSpec, at: Arrangement) -> bool:
    """Whether an operand lies as `at` does, or is not split there."""
    for i, arranged in at.dims.items():
        placement = spec.placements[i]
        if not (placement.is_replicate() or placement.is_partial()) and (
            placement != arranged or spec.shape != at.shape
        ):
            return False
    return True


def _follows(spec: DTensorSpec, at: Arrangement) -> bool:
    """Whether what torch has as shards may be arranged as `at`, and what is pending is a sum."""
    for i, arranged in at.dims.items():
        placement = spec.placements[i]
        if isinstance(placement, Partial):
            masked = type(placement).__name__ == "_MaskPartial"
            if arranged.shared or masked or placement.reduce_op == "avg":
                return False
        elif not placement.is_replicate() and (
            not isinstance(placement, Shard)
            or placement.dim != arranged.dim
            or spec.shape != at.shape
        ):
            return False
    return True


def _arranged(spec: DTensorSpec, at: Arrangement | None) -> DTensorSpec:
    if at is None or spec.shape != at.shape:
        return spec
    placements = (
        at.dims[i] if i in at.dims and isinstance(p, Shard) else p
        for i, p in enumerate(spec.placements)
    )
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _as_shards(spec: DTensorSpec) -> DTensorSpec:
    """`spec` as torch's rules know it."""
    placements = (Shard(p.dim) if isinstance(p, Arranged) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _whole(spec: DTensorSpec, at: Arrangement | None) -> DTensorSpec:
    dims = at.dims if at else ()
    placements = (Replicate() if i in dims else p for i, p in enumerate(spec.placements))
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _is_whole(spec: DTensorSpec, at: Arrangement | None) -> bool:
    return all(spec.placements[i].is_replicate() for i in (at.dims if at else ()))


def _mapped(schema: OpSchema, change: Callable[[DTensorSpec, int], DTensorSpec]) -> OpSchema:
    """`schema` with `change` of each tensor and the column that it is in."""

    def changed(value: Any, column: int = 0) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v, i) for i, v in enumerate(value))
        return change(value, column) if isinstance(value, DTensorSpec) else value

    args = tuple(changed(value) for value in schema.args_schema)
    kwargs = {name: changed(value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, args, kwargs, schema.schema_info)
