"""One dimension of a tensor as a small tree: atoms, products of dims, concatenations of dims.

An atom of size n over p ranks is sharded as evenly as whole numbers allow: the first n mod p ranks
hold one more than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import Coords

Range = tuple[int, int]
"""Half-open range of indices."""


def shard_range(size: int, rank: int, ranks: int) -> Range:
    """The part of `range(size)` that `rank` of `ranks` holds."""
    share, more = divmod(size, ranks)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


@dataclass(frozen=True)
class Atom:
    """One axis; `size` None is known only at run time; `mesh` names the mesh dim that splits it."""

    size: int | None
    mesh: str | None = None

    def __str__(self) -> str:
        return ("?" if self.size is None else str(self.size)) + (
            f"@{self.mesh}" if self.mesh else ""
        )


@dataclass(frozen=True)
class Product:
    """Factors, major to minor."""

    factors: tuple[Dim, ...]

    def __str__(self) -> str:
        return "*".join(f"({f})" if isinstance(f, Concat) else str(f) for f in self.factors)


@dataclass(frozen=True)
class Concat:
    """Terms, one after the other."""

    terms: tuple[Dim, ...]

    def __str__(self) -> str:
        return " + ".join(f"({t})" if isinstance(t, Concat) else str(t) for t in self.terms)


Dim = Atom | Product | Concat


def atoms(dim: Dim) -> Iterator[Atom]:
    """The atoms of `dim`, left to right."""
    if isinstance(dim, Atom):
        yield dim
    else:
        for child in dim.factors if isinstance(dim, Product) else dim.terms:
            yield from atoms(child)


def is_split(dim: Dim) -> bool:
    """Whether some part of `dim` is split over ranks."""
    return any(atom.mesh for atom in atoms(dim))


def dim_size(dim: Dim, coords: Coords | None = None) -> int | None:
    """Size of `dim`, with `coords` that of this rank's part; None where it holds a `?`."""
    if isinstance(dim, Atom):
        if dim.size is None or dim.mesh is None or coords is None:
            return dim.size
        start, stop = shard_range(dim.size, *coords[dim.mesh])
        return stop - start
    is_product = isinstance(dim, Product)
    total = 1 if is_product else 0
    for part in dim.factors if is_product else dim.terms:
        if (size := dim_size(part, coords)) is None:
            return None
        total = total * size if is_product else total + size
    return total


def resolve(dim: Dim, size: int, coords: Coords | None = None) -> Dim:
    """`dim` with its `?` replaced, given the actual `size` of the dimension.

    `size` is the whole one, or with `coords` the size of this rank's part.

    Raises:
        PlanError: the size does not fit the dim.
    """
    if (known := dim_size(dim, coords)) is not None:
        if known != size:
            raise PlanError(
                f"a dimension laid out as '{dim}' should have {known} elements here, not {size}"
            )
        return dim
    if isinstance(dim, Atom):
        if dim.mesh and coords is not None:
            size *= coords[dim.mesh][1]  # what the other ranks hold is not known: taken as even
        return Atom(size, dim.mesh)
    if isinstance(dim, Concat):
        rest = size - sum(dim_size(t, coords) or 0 for t in dim.terms)
        return Concat(
            tuple(resolve(t, rest, coords) if dim_size(t) is None else t for t in dim.terms)
        )
    rest = 1
    for factor in dim.factors:
        rest *= dim_size(factor, coords) or 1
    if size % rest:
        raise PlanError(f"a dimension laid out as '{dim}' cannot have {size} elements here")
    return Product(
        tuple(resolve(f, size // rest, coords) if dim_size(f) is None else f for f in dim.factors)
    )


def unsplit(dim: Dim) -> Dim:
    """The same dim, replicated: no axis of it is sharded."""
    if isinstance(dim, Atom):
        return Atom(dim.size)
    if isinstance(dim, Product):
        return Product(tuple(unsplit(f) for f in dim.factors))
    return Concat(tuple(unsplit(t) for t in dim.terms))


def simplify(dim: Dim) -> Dim:
    """An equal dim with neighbouring whole factors and terms joined and factors of 1 dropped."""
    if isinstance(dim, Atom):
        return dim
    children = [simplify(d) for d in (dim.factors if isinstance(dim, Product) else dim.terms)]
    if all(isinstance(c, Atom) and c.mesh is None for c in children):
        return Atom(dim_size(dim))
    flat: list[Dim] = []
    for child in children:
        nested = (
            child.factors
            if isinstance(child, Product) and isinstance(dim, Product)
            else (
                child.terms if isinstance(child, Concat) and isinstance(dim, Concat) else (child,)
            )
        )
        for c in nested:
            last = flat[-1] if flat else None
            if isinstance(dim, Product) and c == Atom(1):
                continue
            if (
                isinstance(c, Atom)
                and isinstance(last, Atom)
                and c.mesh is None
                and last.mesh is None
            ):
                if None in (c.size, last.size):
                    joined = None
                else:
                    assert c.size is not None and last.size is not None
                    joined = c.size * last.size if isinstance(dim, Product) else c.size + last.size
                flat[-1] = Atom(joined)
            else:
                flat.append(c)
    if len(flat) == 1:
        return flat[0]
    return Product(tuple(flat)) if isinstance(dim, Product) else Concat(tuple(flat))


def only(dim: Dim, mesh: str, coords: Coords, active: Collection[str]) -> Dim:
    """`dim` as it lies on this rank, apart from `mesh`: the other `active` shards are cut down.

    Mesh dims that are neither `mesh` nor `active` do not split the tensor at this moment.
    """
    if isinstance(dim, Product):
        return Product(tuple(only(f, mesh, coords, active) for f in dim.factors))
    if isinstance(dim, Concat):
        return Concat(tuple(only(t, mesh, coords, active) for t in dim.terms))
    if dim.mesh is None or dim.mesh == mesh:
        return dim
    return Atom(dim_size(dim, coords) if dim.mesh in active else dim.size)


def covered(dim: Dim, mesh: str) -> bool:
    """Whether each index of `dim` is held by one rank of `mesh` only."""
    if isinstance(dim, Product):
        return any(covered(f, mesh) for f in dim.factors)
    if isinstance(dim, Concat):
        return all(covered(t, mesh) for t in dim.terms)
    return dim.mesh == mesh
