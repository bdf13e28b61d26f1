"""Shards of a whole that lie in an order, or in sizes, that torch does not know: `Arranged`.

The rows of a fused weight are such: rank 0 has its part of q, of k and of v. So are three heads on
two ranks. Torch takes the parts for those that `torch.chunk` makes. For what goes element by
element, or sums over elements, that is as good; for all else it is not, so torch is made to gather
the whole first, in its order (`watch_propagation`), or it raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils._pytree import tree_leaves

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import atoms
from shardwright.planner.contract.notation import parse
from shardwright.runtime.mesh import Group
from shardwright.runtime.split import Split


class Arranged(Shard):
    """Shard of a whole that lies as `layout` says; `shared` if ranks have some of it in common.

    It equals a `Shard` of its dim while torch settles how an op goes, as its rules want it, and is
    no `Shard` at any other time: what torch keeps of ops on those is not for it.
    """

    layout: str
    shared: bool

    def __new__(cls, dim: int, layout: str, shared: bool = False) -> Arranged:
        """Shard of `dim`, laid out as `layout`."""
        return super().__new__(cls, dim)

    def __init__(self, dim: int, layout: str, shared: bool = False) -> None:
        super().__init__(dim)
        self.layout, self.shared = layout, shared

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Arranged):
            return self.__reduce__() == other.__reduce__()
        return _SETTLING.depth > 0 and self._is_like(other)

    def __ne__(self, other: object) -> bool:
        """Whether it is no shard of that dim: specs look so whether their parts fit each other."""
        return not (self == other or self._is_like(other))

    def _is_like(self, other: object) -> bool:
        return isinstance(other, Shard) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash((self.dim, self.layout, self.shared))

    def __repr__(self) -> str:
        return f"Arranged(dim={self.dim}, layout={self.layout!r})"

    def __copy__(self) -> Arranged:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Arranged:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Arranged, (self.dim, self.layout, self.shared)

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Any
    ) -> Tensor:
        split = self._split(mesh, mesh_dim)
        if local_tensor.shape[self.dim] != split.own_size(local_tensor):
            self._refuse()  # split over other ranks, too
        return split.all_gather(local_tensor)

    def _replicate_to_shard(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, shard_index: Any
    ) -> Tensor:
        return self._split(mesh, mesh_dim).take(local_tensor)

    def _split(self, mesh: Any, mesh_dim: int) -> Split:
        dim = parse(self.layout).dims[self.dim]
        names = {atom.mesh for atom in atoms(dim) if atom.mesh}
        if names != {mesh.mesh_dim_names[mesh_dim]}:
            self._refuse()  # over several sub-axes of a mesh dim
        return Split.of(Group.of(mesh.get_group(mesh_dim)), names.pop(), self.dim, dim)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            f"a tensor laid out as '{self.layout}' lies in an order, or in sizes, that torch does "
            "not know: take it whole with shardwright.full_tensors(model, {name: tensor})"
        )

    _split_tensor = _to_new_shard_dim = _local_shard_size_and_offset = _refuse
    local_shard_size_and_offset: Any = _refuse
    _shard_tensor = _reduce_shard_tensor = _refuse


class _Settling(threading.local):
    """Whether torch settles how an op goes, in this thread."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_SETTLING = _Settling()

Propagate = Callable[[OpSchema], OutputSharding]


@cache
def watch_propagation() -> None:
    """From now on, whenever torch settles how an op goes on DTensors, see that it is right.

    It asks once for each op and layout, so that a step is no slower.
    """
    torch_s: Any = DTensor._op_dispatcher.sharding_propagator
    watched = partial(propagate, torch_s.propagate_op_sharding_non_cached)
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
    with _SETTLING:
        return _settled(torch_s, schema, held)


def _settled(torch_s: Propagate, schema: OpSchema, held: Held) -> OutputSharding:
    out = torch_s(schema)
    wrong = _wrong(out, schema, held)
    if not wrong:
        return _as_held(out, held)
    in_keywords = any(isinstance(s, DTensorSpec) for s in tree_leaves(schema.kwargs_schema))
    if not (in_keywords or schema.is_inplace_op() or schema.is_out_variant_op()):
        whole = _mapped(schema, lambda spec, i: _whole(spec, held[i]) if i in wrong else spec)
        out = torch_s(whole)
        out.redistribute_schema = out.redistribute_schema or whole
        out.needs_redistribute = True
        rest = [None if i in wrong else at for i, at in enumerate(held)]
        taken = [(s, held[i]) for i in wrong for s in _columns(out.redistribute_schema)[i]]
        if all(_is_whole(s, at) for s, at in taken) and not _wrong(out, schema, rest):
            return _as_held(out, rest)
    layout = next(a.layout for at in held if at for a in at.dims.values())
    raise UsageError(
        f"{schema.op} on a tensor laid out as '{layout}' with one that lies otherwise: take both "
        "whole with shardwright.full_tensors(model, {name: tensor})"
    )


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
        dims = {i: p for i, p in enumerate(spec.placements) if isinstance(p, Arranged)}
        if dims:
            return Arrangement(spec.shape, dims)
    return None


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
        follow = [*wanted[i], *(s for s in made if s is not None)]
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
        if isinstance(placement, Shard):
            same = type(placement) is Arranged and placement == arranged
            if not same or spec.shape != at.shape:
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
