"""How a tensor lies over a mesh, as one printable line.

A *dim* is a small tree: an atom (one axis), a product of dims (major to minor) or a sum
(concatenation) of dims. An atom may be split over one mesh dim. A *layout* is a dim per tensor
dimension; a *placement* adds the sums that are pending over mesh dims:

    64, 4@tp*16                            row-parallel weight: 4 heads of 16 columns, heads split
    2@tp*2*16 + 2@tp*16 + 2@tp*16, 64      fused q|k|v, each part split by kv head
    ?, ?, 50257@tp                         logits; ? is a size known only at run time
    ?, ?, 64 | partial tp                  each rank holds one term of a sum
    ?, ?, 64 | grad-partial tp             the same value on each rank, its gradient a term of a sum

In a placement with both shards and `grad-partial`, the flag speaks of the parts of the tensor
that no shard covers (the k and v of a multi-query projection, say).
An atom of size n over p ranks is split as evenly as whole numbers allow: the first n mod p ranks
hold one more than the others.

A mesh dim may be a product of sub-dims, `tp.0` the major one; `tp` means all of them together:

    2@tp.0*4@tp.1*16, 64                   query rows: 2 kv heads x 4 queries each, over 4 ranks
    2@tp.0*16, 64 | grad-partial tp.1      key rows: two ranks hold the same kv head
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from shardwright.errors import PlanError

Coords = Mapping[str, tuple[int, int]]
"""Where a rank stands: mesh dim name -> (index on it, its size)."""

Range = tuple[int, int]
"""Half-open range of indices."""


def shard_range(size: int, rank: int, ranks: int) -> Range:
    """The part of `range(size)` that `rank` of `ranks` holds."""
    share, more = divmod(size, ranks)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def sub_name(mesh: str, numbers: Iterable[int | str]) -> str:
    """The name of some sub-dims of mesh dim `mesh`: `tp.0`, or `tp.01` for two of three."""
    return f"{mesh}." + "".join(map(str, numbers))


def with_sub_dims(coords: Coords, sub_dims: Mapping[str, Sequence[int]]) -> Coords:
    """`coords` with those on sub-dims, alone and some together.

    Args:
        coords: Where a rank stands on each mesh dim.
        sub_dims: Mesh dim -> the sizes of its sub-dims, major first.
    """
    out = dict(coords)
    for mesh, sizes in sub_dims.items():
        at, ranks = coords[mesh]
        if prod(sizes) != ranks:
            raise PlanError(f"sub-dims of {list(sizes)} do not make a mesh dim of {ranks} ranks")
        places: list[int] = []
        for size in reversed(sizes):
            at, place = divmod(at, size)
            places.insert(0, place)
        for n in range(1, len(sizes)):
            for some in combinations(range(len(sizes)), n):
                index, size = 0, 1
                for i in some:
                    index, size = index * sizes[i] + places[i], size * sizes[i]
                out[sub_name(mesh, some)] = (index, size)
    return out


def coords_of(mesh: Mapping[str, int], sub_dims: Mapping[str, Sequence[int]], rank: int) -> Coords:
    """Where a rank stands on each mesh dim and sub-dim; the last mesh dim varies fastest.

    Args:
        mesh: Mesh dim -> its ranks.
        sub_dims: Mesh dim -> the sizes of its sub-dims, major first.
        rank: A number below the product of the mesh.
    """
    out: dict[str, tuple[int, int]] = {}
    for name, size in reversed(list(mesh.items())):
        rank, out[name] = rank // size, (rank % size, size)
    return with_sub_dims(out, sub_dims)


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
        return "*".join(f"({f})" if isinstance(f, Sum) else str(f) for f in self.factors)


@dataclass(frozen=True)
class Sum:
    """Terms, one after the other."""

    terms: tuple[Dim, ...]

    def __str__(self) -> str:
        return " + ".join(f"({t})" if isinstance(t, Sum) else str(t) for t in self.terms)


Dim = Atom | Product | Sum


def atoms(dim: Dim) -> Iterator[Atom]:
    """The atoms of `dim`, left to right."""
    if isinstance(dim, Atom):
        yield dim
    else:
        for child in dim.factors if isinstance(dim, Product) else dim.terms:
            yield from atoms(child)


def dim_size(dim: Dim, coords: Coords | None = None) -> int | None:
    """Size of `dim`, with `coords` that of this rank's part; None where it holds a `?`."""
    if isinstance(dim, Atom):
        if dim.size is None or dim.mesh is None or coords is None:
            return dim.size
        start, stop = shard_range(dim.size, *coords[dim.mesh])
        return stop - start
    parts = [dim_size(d, coords) for d in (dim.factors if isinstance(dim, Product) else dim.terms)]
    if any(p is None for p in parts):
        return None
    total = 1 if isinstance(dim, Product) else 0
    for part in parts:
        assert part is not None
        total = total * part if isinstance(dim, Product) else total + part
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
    if isinstance(dim, Sum):
        rest = size - sum(dim_size(t, coords) or 0 for t in dim.terms)
        return Sum(tuple(resolve(t, rest, coords) if dim_size(t) is None else t for t in dim.terms))
    rest = 1
    for factor in dim.factors:
        rest *= dim_size(factor, coords) or 1
    if size % rest:
        raise PlanError(f"a dimension laid out as '{dim}' cannot have {size} elements here")
    return Product(
        tuple(resolve(f, size // rest, coords) if dim_size(f) is None else f for f in dim.factors)
    )


def local_ranges(dim: Dim, coords: Coords) -> list[Range]:
    """The indices of `dim` that a rank holds, as merged ranges in the order it holds them."""
    size = dim_size(dim)
    assert size is not None, f"resolve() the run-time size of '{dim}' first"
    if isinstance(dim, Atom):
        return _merge([shard_range(size, *coords[dim.mesh]) if dim.mesh else (0, size)])
    out: list[Range] = []
    if isinstance(dim, Sum):
        offset = 0
        for term in dim.terms:
            out += [(offset + a, offset + b) for a, b in local_ranges(term, coords)]
            offset += dim_size(term) or 0
        return _merge(out)
    out = [(0, 1)]
    for factor in dim.factors:
        n, inner = dim_size(factor) or 0, local_ranges(factor, coords)
        if inner == [(0, n)]:
            out = [(a * n, b * n) for a, b in out]
        else:
            out = [
                (i * n + a, i * n + b) for lo, hi in out for i in range(lo, hi) for a, b in inner
            ]
    return _merge(out)


def _merge(ranges: list[Range]) -> list[Range]:
    out: list[Range] = []
    for a, b in ranges:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def uncovered_ranges(dim: Dim, mesh: str) -> list[Range]:
    """The indices of `dim` that every rank of mesh dim `mesh` holds."""
    size = dim_size(dim)
    assert size is not None, f"resolve() the run-time size of '{dim}' first"
    if mesh not in {a.mesh for a in atoms(dim)}:
        return [(0, size)]
    if isinstance(dim, Sum):
        out: list[Range] = []
        offset = 0
        for term in dim.terms:
            out += [(offset + a, offset + b) for a, b in uncovered_ranges(term, mesh)]
            offset += dim_size(term) or 0
        return _merge(out)
    if isinstance(dim, Product):
        out = [(0, 1)]
        for factor in dim.factors:
            n, inner = dim_size(factor) or 0, uncovered_ranges(factor, mesh)
            out = [
                (i * n + a, i * n + b) for lo, hi in out for i in range(lo, hi) for a, b in inner
            ]
        return _merge(out)
    return []


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

    @property
    def meshes(self) -> set[str]:
        """Mesh dims that split some dimension."""
        return {a.mesh for d in self.dims for a in atoms(d) if a.mesh}

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Whole shape, None where a size is known only at run time."""
        return tuple(dim_size(d) for d in self.dims)

    def local_shape(self, coords: Coords) -> tuple[int | None, ...]:
        """Shape of the part that the rank at `coords` holds."""
        return tuple(dim_size(d, coords) for d in self.dims)

    def whole(self) -> Placement:
        """The same dims, nothing split and nothing pending."""
        return Placement(tuple(_unsplit(d) for d in self.dims))


def _unsplit(dim: Dim) -> Dim:
    if isinstance(dim, Atom):
        return Atom(dim.size)
    if isinstance(dim, Product):
        return Product(tuple(_unsplit(f) for f in dim.factors))
    return Sum(tuple(_unsplit(t) for t in dim.terms))


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
            else (child.terms if isinstance(child, Sum) and isinstance(dim, Sum) else (child,))
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
    return Product(tuple(flat)) if isinstance(dim, Product) else Sum(tuple(flat))


def parse(text: str) -> Placement:
    """The placement that `text` writes down; `str` of it gives the text back.

    Raises:
        PlanError: the text is not in the notation.
    """
    layout, *flags = text.split("|")
    pending: dict[str, tuple[str, ...]] = {"partial": (), "grad-partial": ()}
    for flag in flags:
        word, *names = flag.split() or [""]
        if word not in pending or not names:
            raise PlanError(f"cannot read '{flag.strip()}' in placement '{text}'")
        pending[word] = tuple(names)
    dims = tuple(_Parser(part, text).dim() for part in layout.split(",")) if layout.strip() else ()
    return Placement(dims, pending["partial"], pending["grad-partial"])


class _Parser:
    """Recursive descent over `sum := product (+ product)*`, `product := factor (* factor)*`."""

    def __init__(self, part: str, text: str) -> None:
        self.tokens = re.findall(r"\d+|\?|@[\w.]+|[()*+]|\S", part)
        self.text = text

    def fail(self) -> PlanError:
        return PlanError(f"cannot read placement '{self.text}'")

    def dim(self) -> Dim:
        out = self.sum()
        if self.tokens:
            raise self.fail()
        return out

    def sum(self) -> Dim:
        terms = [self.product()]
        while self.tokens and self.tokens[0] == "+":
            self.tokens.pop(0)
            terms.append(self.product())
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def product(self) -> Dim:
        factors = [self.factor()]
        while self.tokens and self.tokens[0] == "*":
            self.tokens.pop(0)
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def factor(self) -> Dim:
        token = self.tokens.pop(0) if self.tokens else ""
        if token == "(":
            inner = self.sum()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise self.fail()
            return inner
        if token != "?" and not token.isdigit():
            raise self.fail()
        mesh = self.tokens.pop(0)[1:] if self.tokens and self.tokens[0].startswith("@") else None
        if mesh == "":
            raise self.fail()
        return Atom(None if token == "?" else int(token), mesh)
