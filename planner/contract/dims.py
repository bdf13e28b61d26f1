"""A tensor dimension as a small tree: atoms, products of dims, concatenations of dims.

An atom of size n over p ranks is sharded as evenly as whole numbers allow: the first n mod p ranks
hold one more than the others. An atom with shares says how many indices each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import EP, Coords

Range = tuple[int, int]
"""Half-open range of indices."""
MAX_PIECES = 1 << 20
"""Most ranges of one dim on one rank: no real tensor is split finer."""


def shard_range(size: int, rank: int, ranks: int) -> Range:
    """Return the indices of `range(size)` that `rank` of `ranks` holds."""
    share, more = divmod(size, ranks)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def apportioned(size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return how many of `size` indices each rank holds, in the ratio of weights.

    Each rank holds its exact share, rounded up or down.
    """
    ends = [(2 * size * w + sum(weights)) // (2 * sum(weights)) for w in accumulate(weights)]
    return tuple(b - a for a, b in pairwise((0, *ends)))


@dataclass(frozen=True)
class Atom:
    """One axis.

    Attributes:
        size: Its indices; None if known only at run time.
        mesh: The mesh dim that splits it.
        shares: How many indices each rank of the mesh dim holds, if it does not split evenly.
    """

    size: int | None
    mesh: str | None = None
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        size = "?" if self.size is None else str(self.size)
        return size + (f"@{self.mesh}" if self.mesh else "") + "".join(f":{n}" for n in self.shares)

    def held(self, coords: Coords) -> Range:
        """Return the indices that a rank holds of an axis whose size is known."""
        assert self.size is not None, "an axis of a size that is known at run time"
        if self.mesh is None:
            return 0, self.size
        rank, ranks = coords[self.mesh]
        if not self.shares or ranks == 1:  # of a dry run, as if one rank had all experts
            return shard_range(self.size, rank, ranks)
        start = sum(self.shares[:rank])
        return start, start + self.shares[rank]


def experts_of_ranks(first: int, count: int, ranks: int) -> Atom:
    """Return the axis of the first of `count` experts, which ranks of ep share out."""
    if first == count:
        return Atom(count, EP)
    ends = [min(first, shard_range(count, rank, ranks)[1]) for rank in range(ranks)]
    return Atom(first, EP, tuple(b - a for a, b in pairwise((0, *ends))))


@dataclass(frozen=True)
class Product:
    """Factors, from major to minor."""

    factors: tuple[Dim, ...]

    def __str__(self) -> str:
        return "*".join(f"({f})" if isinstance(f, Concat) else str(f) for f in self.factors)


@dataclass(frozen=True)
class Concat:
    """Concatenated terms."""

    terms: tuple[Dim, ...]

    def __str__(self) -> str:
        return " + ".join(f"({t})" if isinstance(t, Concat) else str(t) for t in self.terms)


Dim = Atom | Product | Concat


def parts_of(dim: Product | Concat) -> tuple[Dim, ...]:
    """Return the factors of a product, or the terms of a concatenation."""
    return dim.factors if isinstance(dim, Product) else dim.terms


def atoms(dim: Dim) -> Iterator[Atom]:
    """Yield the atoms of `dim` from left to right."""
    if isinstance(dim, Atom):
        yield dim
    else:
        for part in parts_of(dim):
            yield from atoms(part)


def with_atoms(dim: Dim, change: Callable[[Atom], Atom]) -> Dim:
    """Return `dim` with `change` applied to each atom."""
    if isinstance(dim, Atom):
        return change(dim)
    return type(dim)(tuple(with_atoms(part, change) for part in parts_of(dim)))


def is_split(dim: Dim) -> bool:
    """Return whether some part of `dim` is split over ranks."""
    return any(atom.mesh for atom in atoms(dim))


def dim_size(dim: Dim, coords: Coords | None = None) -> int | None:
    """Return the size of `dim`, or of this rank's part with `coords`; None if it contains a `?`."""
    if isinstance(dim, Atom):
        if dim.size is None or coords is None:
            return dim.size
        start, stop = dim.held(coords)
        return stop - start
    sizes = [dim_size(part, coords) for part in parts_of(dim)]
    if None in sizes:
        return None
    return prod(sizes) if isinstance(dim, Product) else sum(sizes)  # type: ignore[arg-type]


def resolve(dim: Dim, size: int, coords: Coords | None = None) -> Dim:
    """Return `dim` with its `?` replaced, given the actual `size` of the dimension.

    `size` is the unsharded size, or with `coords` the size of this rank's shard.

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
            size *= coords[dim.mesh][1]  # other ranks' sizes are unknown: assume an even split
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
    """Return the replicated dim: the same axes, none of them sharded."""
    return with_atoms(dim, lambda atom: Atom(atom.size))


def simplify(dim: Dim) -> Dim:
    """Return an equal dim with neighbouring unsplit parts joined, without nesting and 1 factors."""
    if isinstance(dim, Atom):
        return dim
    kind = type(dim)
    children = [simplify(part) for part in parts_of(dim)]
    if not any(map(is_split, children)):
        return Atom(dim_size(dim))
    flat: list[Dim] = []
    for child in children:
        for part in parts_of(child) if isinstance(child, kind) else (child,):
            if kind is Product and part == Atom(1):
                continue
            if flat and not is_split(flat[-1]) and not is_split(part):
                flat[-1] = Atom(dim_size(kind((flat[-1], part))))
            else:
                flat.append(part)
    return flat[0] if len(flat) == 1 else kind(tuple(flat))


def only(dim: Dim, mesh: str, coords: Coords, active: Collection[str]) -> Dim:
    """Return `dim` local to this rank over the `active` mesh dims, not yet split over `mesh`."""

    def local(atom: Atom) -> Atom:
        if atom.mesh in (None, mesh):
            return atom
        return Atom(dim_size(atom, coords) if atom.mesh in active else atom.size)

    return with_atoms(dim, local)


def covered(dim: Dim, mesh: str) -> bool:
    """Return whether each index of `dim` is held by only one rank of `mesh`."""
    if isinstance(dim, Product):
        return any(covered(f, mesh) for f in dim.factors)
    if isinstance(dim, Concat):
        return all(covered(t, mesh) for t in dim.terms)
    return dim.mesh == mesh


def pieces(dim: Dim) -> int:
    """Return an upper bound on the number of ranges of `dim` that a rank holds."""
    if isinstance(dim, Atom):
        return 1
    if isinstance(dim, Concat):
        return sum(map(pieces, dim.terms))
    out = before = 1
    for factor in dim.factors:
        if is_split(factor):
            out = before * pieces(factor)
        before *= dim_size(factor) or 1
    return out


def local_ranges(dim: Dim, coords: Coords) -> list[Range]:
    """Return the indices of `dim` that a rank holds, as merged ranges in the rank's order."""
    return _ranges(dim, lambda atom: [atom.held(coords)])


def uncovered_ranges(dim: Dim, mesh: str) -> list[Range]:
    """Return the indices of `dim` that every rank of mesh dim `mesh` holds."""
    return _ranges(dim, lambda atom: [] if atom.mesh == mesh else [(0, atom.size or 0)])


def _ranges(dim: Dim, of_atom: Callable[[Atom], list[Range]]) -> list[Range]:
    """Return merged ranges of indices of `dim`, given the ranges of its atoms."""
    size = dim_size(dim)
    assert size is not None, f"resolve() the run-time size of '{dim}' first"
    if isinstance(dim, Atom):
        return merged(of_atom(dim))
    out: list[Range] = []
    if isinstance(dim, Concat):
        offset = 0
        for term in dim.terms:
            out += [(offset + a, offset + b) for a, b in _ranges(term, of_atom)]
            offset += dim_size(term) or 0
        return merged(out)
    out = [(0, 1)]
    for factor in dim.factors:
        n, inner = dim_size(factor) or 0, _ranges(factor, of_atom)
        if inner == [(0, n)]:
            out = [(a * n, b * n) for a, b in out]
        else:
            out = [
                (i * n + a, i * n + b) for lo, hi in out for i in range(lo, hi) for a, b in inner
            ]
    return merged(out)


def merged(ranges: list[Range]) -> list[Range]:
    """Drop empty ranges and join adjacent ones, keeping the order."""
    out: list[Range] = []
    for a, b in ranges:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out
