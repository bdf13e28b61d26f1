"""The mesh of ranks that share a model, by mesh dim, with or without process groups.

A plan may factor a mesh dim into sub-axes. `with_sub_axes` makes the groups for those from the
group of the full mesh dim; the user's `DeviceMesh` does not have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import EP, TP, Coords, sub_name, with_sub_axes
from shardwright.runtime.ranks.failure import noting_sockets
from shardwright.runtime.shared_memory.channel import Channel
from shardwright.runtime.shared_memory.connect import channel_of
from shardwright.runtime.shared_memory.symmetric import Symmetric, symmetric_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks along one mesh dim, as seen by one of them.

    `rank` counts within the group. Without `pg` the group is shape-only: its collectives return
    results of the right shape without communication, which is how a plan is tried out on meta.
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

    @cached_property
    def channel(self) -> Channel | None:
        """Return the shared-memory channel, if any. All ranks must make the first call together."""
        return None if self.pg is None else channel_of(self.pg)

    @cached_property
    def symmetric(self) -> Symmetric | None:
        """Return the ranks' shared GPU memory, if any. All must make the first call together."""
        return None if self.pg is None else symmetric_of(self.pg)

    @classmethod
    def of(cls, pg: ProcessGroup) -> Group:
        """Wrap a `torch.distributed` process group."""
        return cls(pg.rank(), pg.size(), pg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied model communicates with the same ranks


_known: Any = WeakIdKeyDictionary()
"""DeviceMesh -> Mesh, so that the groups of sub-axes are made only once."""


def forget_meshes() -> None:
    """Drop all meshes and their groups, at the end of the process."""
    _known.clear()


class Mesh:
    """Mesh dims by name, and this rank's coordinate on each."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = dict(groups)
        self.coords: Coords = {name: (g.rank, g.size) for name, g in self.groups.items()}
        self.sub_axes: dict[str, tuple[int, ...]] = {}
        self.device_mesh: DeviceMesh | None = None
        self._parameter_mesh: DeviceMesh | None = None
        self._finer: dict[tuple[tuple[str, tuple[int, ...]], ...], Mesh] = {}
        self._over: dict[tuple[str, ...], Group] = {}

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """Return the mesh of a `DeviceMesh`, whose dims must have names."""
        if not device_mesh.mesh_dim_names:
            raise PlanError('the DeviceMesh has no dim names: pass mesh_dim_names=("tp",)')
        if device_mesh not in _known:
            names = device_mesh.mesh_dim_names
            _known[device_mesh] = cls({n: Group.of(device_mesh.get_group(n)) for n in names})
            _known[device_mesh].device_mesh = device_mesh
        return _known[device_mesh]

    @classmethod
    def shape_only(cls, coords: Coords) -> Mesh:
        """Make a mesh without process groups: `Mesh.shape_only({"tp": (rank, size)})`."""
        return cls({name: Group(rank, size) for name, (rank, size) in coords.items()})

    def with_sub_axes(self, sub_axes: Mapping[str, Sequence[int]]) -> Mesh:
        """Return this mesh with groups for sub-axes. All ranks must call it in the same order.

        Groups are made once: a second call with the same sizes returns the same mesh.

        Args:
            sub_axes: Mesh dim -> the sizes of its sub-axes, major first.

        Raises:
            PlanError: the product of the sizes is not the size of the mesh dim.
        """
        asked = {mesh: tuple(sizes) for mesh, sizes in sorted(sub_axes.items())}
        wanted = {m: s for m, s in asked.items() if self.sub_axes.get(m) != s}
        key = tuple(wanted.items())
        if wanted and key not in self._finer:
            made = Mesh({**self.groups, **self._sub_groups(wanted)})
            made.sub_axes = {**self.sub_axes, **wanted}
            made.device_mesh = self.device_mesh
            self._finer[key] = made
        return self._finer[key] if wanted else self

    def parameter_mesh(self) -> DeviceMesh | None:
        """Return the DeviceMesh of `ep` and tp, one dim per sub-axis; None without one.

        All ranks call it.
        """
        if self._parameter_mesh is None and self.device_mesh is not None:
            names = self.device_mesh.mesh_dim_names or ()
            own = tuple(name for name in names if name in (EP, TP))
            part = self.device_mesh if names == own else self.device_mesh[own]
            if sizes := self.sub_axes.get(TP):
                names = tuple(sub_name(TP, [i]) for i in range(len(sizes)))
                with noting_sockets():
                    part = part._unflatten(own.index(TP), sizes, names)
            self._parameter_mesh = part
        return self._parameter_mesh

    def _sub_groups(self, sub_axes: Mapping[str, tuple[int, ...]]) -> dict[str, Group]:
        out: dict[str, Group] = {}
        for mesh, sizes in sub_axes.items():
            whole = self[mesh]
            every = [
                with_sub_axes({mesh: (rank, whole.size)}, {mesh: sizes})
                for rank in range(whole.size)
            ]
            mine = every[whole.rank]
            for name in sorted(mine.keys() - {mesh}):
                # The ranks that differ from this one only in these sub-axes, in order.
                digits = set(name.removeprefix(f"{mesh}."))
                fixed = [f"{mesh}.{i}" for i in range(len(sizes)) if str(i) not in digits]
                members = [r for r, c in enumerate(every) if all(c[f] == mine[f] for f in fixed)]
                out[name] = _sub_group(whole, members)
        return out

    def over(self, names: Iterable[str]) -> Group:
        """Return the group of the ranks that differ only in some mesh dims.

        All ranks must call it, in the same order: that of several dims is made, once.
        """
        several = tuple(sorted(name for name in names if self[name].size > 1))
        if len(several) == 1:
            return self[several[0]]
        if not several or self.device_mesh is None:
            return Group(0, prod(self[name].size for name in several))
        if several not in self._over:
            dims = self.device_mesh.mesh_dim_names or ()
            at = zip(dims, self.device_mesh.get_coordinate() or (), strict=True)
            ranks = self.device_mesh.mesh[tuple(slice(None) if d in several else i for d, i in at)]
            made = _new_group(ranks.flatten().tolist(), self.process_groups(several)[0])
            self._over[several] = made
        return self._over[several]

    def process_groups(self, names: Iterable[str]) -> list[ProcessGroup]:
        """Return the process groups of the mesh dims `names` that have several ranks."""
        groups = [self[name] for name in sorted(names)]
        return [g.pg for g in groups if g.pg is not None and g.size > 1]

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


def _sub_group(whole: Group, members: Sequence[int]) -> Group:
    """Return the group of some ranks of `whole`; this rank must be one of them."""
    if whole.pg is None:
        return Group(members.index(whole.rank), len(members))
    ranks = dist.get_process_group_ranks(whole.pg)
    return _new_group([ranks[m] for m in members], whole.pg)


def _new_group(ranks: list[int], like: ProcessGroup) -> Group:
    """Make a group with the timeout of another one. Only its ranks call this."""
    with noting_sockets():
        pg = dist.new_group(
            ranks,
            timeout=_timeout(like),
            use_local_synchronization=True,  # ranks of other groups need not call this
            sort_ranks=False,
        )
    assert isinstance(pg, dist.ProcessGroup), "this rank is a member"
    return Group.of(pg)


def _timeout(group: ProcessGroup) -> Any:
    """Return a group's timeout; None if none was set, which torch takes as half an hour."""
    for device in group._device_types:
        return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return None
