"""Placements: how the dims of a tensor are sharded over the mesh, and what is Partial."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.planner.contract.dims import Atom, Dim, atoms, dim_size, unsplit
from shardwright.planner.contract.mesh import Coords


@dataclass(frozen=True)
class Placement:
    """A layout and the mesh dims over which a sum is pending, of the value or of its gradient."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    grad_partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(map(str, self.dims))
        for word, names in (("partial", self.partial), ("grad-partial", self.grad_partial)):
            if names:
                text += f" | {word} {' '.join(names)}"
        return text

    @cached_property
    def meshes(self) -> frozenset[str]:
        """Mesh dims that split some dimension."""
        return frozenset(a.mesh for d in self.dims for a in atoms(d) if a.mesh)

    @property
    def named(self) -> frozenset[str]:
        """Every mesh dim and sub-axis that the placement names."""
        return self.meshes | {*self.partial, *self.grad_partial}

    @cached_property
    def shape(self) -> tuple[int | None, ...]:
        """Unsharded shape, None for sizes known only at run time."""
        return tuple(dim_size(d) for d in self.dims)

    def local_shape(self, coords: Coords) -> tuple[int | None, ...]:
        """Shape of the shard of the rank at `coords`."""
        return tuple(dim_size(d, coords) for d in self.dims)

    def of_any_size(self) -> Placement:
        """The same for any size of the dims that are not split."""
        dims = (d if any(a.mesh for a in atoms(d)) else Atom(None) for d in self.dims)
        return Placement(tuple(dims), self.partial, self.grad_partial)

    def replicated(self) -> Placement:
        """The same dims, nothing split and nothing pending."""
        return Placement(tuple(unsplit(d) for d in self.dims))
