"""Shards of a whole that lie in an order, or in sizes, that torch does not know: `Arranged`.

The rows of a fused weight are such: rank 0 has its part of q, of k and of v. So are three heads on
two ranks. What ops do with them is in `runtime/tensors/propagation.py`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import UsageError
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.tensors.ways import Ways, around


class Arranged(_StridedShard):
    """Shard of a whole that lies as `layout` says; `shared` if ranks have some of it in common.

    It is torch's placement for shards in another order than its own: nothing takes it for a `Shard`
    or for whole, and what wants to know the order asks for `split_factor`, which raises, or calls
    the methods below.
    """

    layout: str
    shared: bool
    whole_over: tuple[int, ...]
    """Dims of the mesh over which the tensor is whole though `layout` splits it, in the midst of a
    redistribution."""

    def __init__(
        self, dim: int, layout: str, shared: bool = False, whole_over: tuple[int, ...] = ()
    ) -> None:
        super().__init__(dim)
        self.layout, self.shared, self.whole_over = layout, shared, whole_over

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arranged) and self.__reduce__() == other.__reduce__()

    def __ne__(self, other: object) -> bool:  # that of torch compares dims alone
        return not self == other

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        return f"Arranged(dim={self.dim}, layout={self.layout!r})"

    __str__ = __repr__

    def __copy__(self) -> Arranged:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Arranged:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Arranged, (self.dim, self.layout, self.shared, self.whole_over)

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Any
    ) -> Tensor:
        place, ways = tuple(mesh.get_coordinate()), self._ways(mesh)
        group = Group.of(mesh.get_group(mesh_dim))
        at = ((*place[:mesh_dim], rank, *place[mesh_dim + 1 :]) for rank in range(group.size))
        parts = [around(ways, one, self.whole_over) for one in at]
        if local_tensor.shape[self.dim] != len(parts[group.rank]):
            self._refuse()  # split over other ranks, too
        joined = around(ways, place, (*self.whole_over, mesh_dim))
        most, found = max(map(len, parts)), torch.empty_like(joined)
        for rank, part in enumerate(parts):
            found[torch.searchsorted(joined, part)] = torch.arange(len(part)) + rank * most
        rows = local_tensor.movedim(self.dim, 0)
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        rows = all_gather(rows, group).flatten(0, 1)[found.to(rows.device)]
        return rows.movedim(0, self.dim).contiguous()

    def _replicate_to_strided_shard(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, shard_index: Any
    ) -> Tensor:
        place, ways = tuple(mesh.get_coordinate()), self._ways(mesh)
        whole = around(ways, place, (*self.whole_over, mesh_dim))
        mine = torch.searchsorted(whole, around(ways, place, self.whole_over))
        return local_tensor.index_select(self.dim, mine.to(local_tensor.device))

    def _ways(self, mesh: Any) -> Ways:
        return Ways(self.layout, self.dim, tuple(mesh.mesh_dim_names), tuple(mesh.shape), ())

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a tensor laid out as '{self.layout}' lies in an order, or in sizes, that torch does "
            "not know: take it whole with shardwright.full_tensors(model, {name: tensor})"
        )

    split_factor: Any = property(_refuse)
    _split_tensor = _select_split_tensor = _shard_tensor = _split_factor_int = _refuse
    _local_shard_size_and_offset = local_shard_size_and_offset = __fx_repr__ = _refuse
