"""Placements: how a tensor's dims are sharded over the mesh, and over what it is Partial."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.planner.contract.dims import Atom, Dim, atoms, dim_size, unsplit
from shardwright.planner.contract.mesh import Coords


@dataclass(frozen=True)
class Placement:
    """A layout, and the mesh dims over which the value or its gradient is Partial."""

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
        """Return the mesh dims that split some dimension."""
        return frozenset(a.mesh for d in self.dims for a in atoms(d) if a.mesh)

    @property
    def named(self) -> frozenset[str]:
        """Return every mesh dim and sub-axis that the placement names."""
        return self.meshes | {*self.partial, *self.grad_partial}

    @cached_property
    def shape(self) -> tuple[int | None, ...]:
        """Return the unsharded shape, with None for sizes known only at run time."""
        return tuple(dim_size(d) for d in self.dims)

    def local_shape(self, coords: Coords) -> tuple[int | None, ...]:
        """Return the shape of the local tensor on the rank at `coords`."""
        return tuple(dim_size(d, coords) for d in self.dims)

    def of_any_size(self) -> Placement:
        """Return the placement with dims that are not split made of any size."""
        dims = (d if any(a.mesh for a in atoms(d)) else Atom(None) for d in self.dims)
        return Placement(tuple(dims), self.partial, self.grad_partial)

    def replicated(self) -> Placement:
        """Return the replicated placement of the same dims, with nothing Partial."""
        return Placement(tuple(unsplit(d) for d in self.dims))
