"""The ranks that share a model, by mesh dim; with or without a process group behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.errors import PlanError
from shardwright.planner.layout import Coords

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks along one mesh dim, as seen by one of them.

    `rank` counts within the group. Without `pg` the group is shape-only: its collectives give
    results of the right shape and talk to nobody, which is how a plan is tried out on meta.
    """

    rank: int
    size: int
    pg: ProcessGroup | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise PlanError(f"rank {self.rank} is not in a group of {self.size}")
        # Compiled graphs refer to a group by this name, not by the object.
        object.__setattr__(self, "name", "" if self.pg is None else self.pg.group_name)

    @classmethod
    def of(cls, pg: ProcessGroup) -> Group:
        """The group behind a `torch.distributed` process group."""
        return cls(pg.rank(), pg.size(), pg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied model talks to the same ranks


class Mesh:
    """Mesh dims by name, and where this rank stands on each."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = dict(groups)
        self.coords: Coords = {name: (g.rank, g.size) for name, g in self.groups.items()}

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh behind torch's own; its dims must have names."""
        if not device_mesh.mesh_dim_names:
            raise PlanError('the DeviceMesh has no dim names: pass mesh_dim_names=("tp",)')
        return cls(
            {name: Group.of(device_mesh.get_group(name)) for name in device_mesh.mesh_dim_names}
        )

    @classmethod
    def shape_only(cls, coords: Coords) -> Mesh:
        """A mesh without process groups: `Mesh.shape_only({"tp": (rank, size)})`."""
        return cls({name: Group(rank, size) for name, (rank, size) in coords.items()})

    def __getitem__(self, name: str) -> Group:
        try:
            return self.groups[name]
        except KeyError:
            known = ", ".join(sorted(self.groups)) or "none"
            raise PlanError(
                f"the plan splits over mesh dim '{name}'; the mesh has: {known}"
            ) from None

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{n}: {r} of {s}" for n, (r, s) in self.coords.items()) + ")"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self
