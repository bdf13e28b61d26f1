"""Shards of a whole that lie in an order, or in sizes, that torch does not know: `Arranged`.

The rows of a fused weight are such: rank 0 has its part of q, of k and of v. So are three heads on
two ranks. What ops do with them is in `runtime/propagation.py`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import atoms
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.ranges import local_ranges
from shardwright.runtime.mesh import Group
from shardwright.runtime.split import Split


class Arranged(_StridedShard):
    """Shard of a whole that lies as `layout` says; `shared` if ranks have some of it in common.

    It is torch's placement for shards in another order than its own: nothing takes it for a `Shard`
    or for whole, and what wants to know the order asks for `split_factor`, which raises, or calls
    the methods below.
    """

    layout: str
    shared: bool

    def __init__(self, dim: int, layout: str, shared: bool = False) -> None:
        super().__init__(dim)
        self.layout, self.shared = layout, shared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arranged) and self.__reduce__() == other.__reduce__()

    def __ne__(self, other: object) -> bool:  # that of torch compares dims alone
        return not self == other

    def __hash__(self) -> int:
        return hash((self.dim, self.layout, self.shared))

    def __repr__(self) -> str:
        return f"Arranged(dim={self.dim}, layout={self.layout!r})"

    __str__ = __repr__

    def __copy__(self) -> Arranged:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Arranged:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Arranged, (self.dim, self.layout, self.shared)

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Any
    ) -> Tensor:
        split, dim = self._split(mesh, mesh_dim), parse(self.layout).dims[self.dim]
        ranks = {split.mesh: (split.group.rank, split.group.size)}
        own = sum(stop - start for start, stop in local_ranges(dim, ranks))
        if local_tensor.shape[self.dim] != own:
            self._refuse()  # split over other ranks, too
        return split.all_gather(local_tensor)

    def _replicate_to_strided_shard(
        self, local_tensor: Tensor, mesh: Any, mesh_dim: int, shard_index: Any
    ) -> Tensor:
        return self._split(mesh, mesh_dim).take(local_tensor)

    def _split(self, mesh: Any, mesh_dim: int) -> Split:
        dim = parse(self.layout).dims[self.dim]
        names = {atom.mesh for atom in atoms(dim) if atom.mesh}
        if names != {mesh.mesh_dim_names[mesh_dim]}:
            self._refuse()  # over several sub-axes of a mesh dim
        return Split.of(Group.of(mesh.get_group(mesh_dim)), names.pop(), self.dim, dim)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a tensor laid out as '{self.layout}' lies in an order, or in sizes, that torch does "
            "not know: take it whole with shardwright.full_tensors(model, {name: tensor})"
        )

    split_factor: Any = property(_refuse)
    _split_tensor = _select_split_tensor = _shard_tensor = _split_factor_int = _refuse
    _local_shard_size_and_offset = local_shard_size_and_offset = __fx_repr__ = _refuse
