"""`SubAxes`: the mesh dim as a product of sub-axes, and which axes may be sharded over them.

With 2 key and value heads on 4 ranks the heads cannot be sharded over all ranks. So the mesh dim is
factored into 2 x 2: the heads are sharded over the first sub-axis, the query heads of each over the
second, and two ranks hold the same key and value head. All other axes use the full mesh dim.

A set of sub-axes is a mask: bit 0 is the major one. If no axis needs sub-axes, there is one, the
mesh dim itself. The ranks of `cp`, which shard only sequences, are one more sub-axis, after those
of `tp`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from shardwright.planner.contract.dims import apportioned
from shardwright.planner.contract.mesh import CP, MAX_SUB_AXES, TP, sub_name
from shardwright.planner.graph.axes import CONCAT, PRODUCT, Axes, Dim, atoms_of, factors_of, find
from shardwright.planner.graph.graph import Graph, Op

TOLERATED = 1.1
"""A split is even enough if its longest part is at most this many times the even share."""


@dataclass(frozen=True)
class SubAxes:
    """The mesh dim `tp` as a product of sub-axes of these sizes, major first; and `cp`.

    With `weights` its ranks hold parts of axes in that ratio, and it has no sub-axes. Experts are
    spread over the ranks of `ep`, which shards nothing else.
    """

    sizes: tuple[int, ...]
    cp: int = 1
    weights: tuple[int, ...] = ()
    ep: int = 1

    @cached_property
    def full(self) -> int:
        """The mask of all sub-axes of the mesh dim; 0 where it has one rank, and cp has several."""
        return (1 << len(self.sizes)) - 1

    @cached_property
    def along(self) -> int:
        """The mask of cp; 0 where it has one rank."""
        return 1 << len(self.sizes) if self.cp > 1 else 0

    @cached_property
    def sequence(self) -> int:
        """The mask that shards sequences: cp if it has ranks, else the full mesh dim."""
        return self.along or self.full

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """The mask of each sub-axis, major first."""
        return tuple(1 << i for i in range(len(self.sizes) + (self.cp > 1)))

    @cached_property
    def ranks(self) -> int:
        """Ranks on the mesh dim."""
        return prod(self.sizes)

    def table(self) -> dict[str, list[int]]:
        """Return the plan's table of sub-axes: the mesh dim with their sizes, if it has several."""
        return {TP: list(self.sizes)} if len(self.sizes) > 1 else {}

    def size(self, mask: int) -> int:
        """Return the number of ranks along the sub-axes of `mask`."""
        sizes = (*self.sizes, self.cp)
        return prod(n for n, bit in zip(sizes, self.bits, strict=False) if mask & bit)

    def shares(self, size: int, mask: int) -> tuple[int, ...]:
        """Return what each rank holds of an axis over `mask`; empty if all hold the same."""
        return apportioned(size, self.weights) if self.weights and mask == self.full else ()

    def part(self, size: int, mask: int, rank: int | None = None) -> int:
        """Return what a rank of the mesh dim holds of an axis over `mask`; None is the most."""
        if not (shares := self.shares(size, mask)):
            return -(-size // self.size(mask))
        return max(shares) if rank is None else shares[rank]

    def reaches_all(self, size: int) -> bool:
        """Return whether each rank of the mesh dim holds some of an axis over it."""
        return size >= self.ranks and 0 not in self.shares(size, self.full)

    def text(self, mask: int) -> str:
        """Return the name of `mask` in layouts: `tp` for the full mesh dim, `tp.0`, `cp`."""
        if self.along and mask == self.along:
            return CP
        if mask == self.full:
            return TP
        return sub_name(TP, [i for i, bit in enumerate(self.bits) if mask & bit])

    def texts(self, mask: int) -> tuple[str, ...]:
        """Return the names of the sub-axes of `mask` as a list; one name for the full mesh dim."""
        if mask & self.along:
            return (CP, *self.texts(mask & ~self.along))
        if mask and mask == self.full:
            return (TP,)
        return tuple(self.text(bit) for bit in self.bits if mask & bit)

    def prefix(self, ranks: int) -> int:
        """Return the mask of the major sub-axes with this many ranks together; 0 if none."""
        for i in range(1, len(self.sizes)):
            if prod(self.sizes[:i]) == ranks:
                return (1 << i) - 1
        return 0


def uneven(size: int, ranks: int) -> bool:
    """Whether the longest part of `size` over `ranks` is much longer than the even share."""
    return -(-size // ranks) * ranks > TOLERATED * size


def find_sub_axes(
    graph: Graph, axes: Axes, ranks: int, cp: int = 1, weights: Sequence[int] = ()
) -> SubAxes:
    """Return the sub-axes that the axes of the parameters need, with `cp`.

    An axis needs a sub-axis if it is like heads: outermost in a product, too short or too uneven
    for all ranks, and with a common factor with the number of ranks. Of factors that do not divide
    each other, the one that more parameters need is taken. With `weights` there are none.
    """
    if weights:
        return SubAxes((ranks,), cp, tuple(weights))
    asked: dict[int, int] = {}
    for atom in _leading(graph, axes):
        share = gcd(atom.size, ranks)
        if 1 < share < ranks and uneven(atom.size, ranks):
            asked[share] = asked.get(share, 0) + 1
    chain = [1, ranks]
    for share in sorted(asked, key=lambda s: (-asked[s], s)):
        if len(chain) > MAX_SUB_AXES:
            break
        if all(max(share, c) % min(share, c) == 0 for c in chain):
            chain.append(share)
    chain.sort()
    sizes = tuple(b // a for a, b in zip(chain, chain[1:], strict=False)) or (1,)
    return SubAxes(() if cp > 1 == ranks else sizes, cp)


def masks(graph: Graph, axes: Axes, sub: SubAxes) -> dict[int, tuple[int, ...]]:
    """Return for each axis of parameters the sets of sub-axes that it may be sharded over.

    Nearly all axes take the full mesh dim or nothing. An axis that needs a sub-axis may also be
    sharded over that, and the axes right inside it over the rest of the mesh dim.
    """
    whole = [sub.full] if sub.full else []
    stored = (a for dim in _of_parameters(graph, axes) for a in atoms_of(dim) if not a.unshardable)
    out = {a.id: whole[:] if sub.reaches_all(a.size) else [] for a in stored}
    rests: dict[int, int] = {}
    for atom in _leading(graph, axes):
        part = 0 if sub.weights else sub.prefix(gcd(atom.size, sub.ranks))
        if part and uneven(atom.size, sub.ranks):
            rests[atom.id] = sub.full & ~part
            out[atom.id] = [*(m for m in out[atom.id] if m == sub.full), part]
    for outer, inner in _inside(graph, axes, rests.keys()):
        rest = rests[outer]
        taken = out.setdefault(inner.id, [])
        if inner.size >= sub.size(rest) and rest not in taken:
            taken.append(rest)
    return {a: tuple(found) for a, found in out.items() if found}


def _leading(graph: Graph, axes: Axes) -> Iterator[Dim]:
    """Yield the outermost axis of each product in the dims of parameters."""
    for dim in _of_parameters(graph, axes):
        yield from (f for product in _products(dim) for f in _outermost(product))


def _of_parameters(graph: Graph, axes: Axes) -> Iterator[Dim]:
    """Yield the dims of parameters that may be sharded, once for blocks that share them."""
    found = (axes.dims[use.stored] for use in graph.uses if not use.is_buffer)
    for dims in {id(dims): dims for dims in found}.values():
        yield from (dim for dim in dims if not find(dim).unshardable)


def _products(dim: Dim) -> Iterator[Dim]:
    """Yield the dim if it is a product, or the products in it if it is a concatenation."""
    dim = find(dim)
    if dim.kind == PRODUCT:
        yield dim
    elif dim.kind == CONCAT:
        for child in dim.children:
            yield from _products(child)


def _outermost(dim: Dim) -> list[Dim]:
    """Return the outermost axis of `dim` as a list, empty if it cannot be sharded.

    An axis may be unshardable although its dim is not, if its other uses contradict each other.
    """
    first = atoms_of(dim)[:1] if not find(dim).unshardable else []
    return [a for a in first if not a.unshardable]


def _inside(graph: Graph, axes: Axes, outer: Collection[int]) -> list[tuple[int, Dim]]:
    """Return pairs of an axis in `outer` and an axis right inside it that can be sharded with it.

    The inner axis may not be one that an op needs unsharded, nor one that an op sums over while it
    keeps the outer axis (the channels of a head, over which scores are summed): the result would be
    sharded and Partial at once.
    """
    found: dict[tuple[int, int], Dim] = {}
    kinds = {id(dims): dims for dims in axes.dims.values()} if outer else {}
    roots = {find(d).id: d for dims in kinds.values() for d in dims}
    for product in (p for dim in roots.values() for p in _products(dim)):
        factors = [*factors_of(product)]
        for left, right in zip(factors, factors[1:], strict=False):
            if left.id in outer:
                terms = right.children if right.kind == CONCAT else [right]
                found |= {(left.id, a.id): a for term in terms for a in _outermost(term)}
    if found:
        for op in {id(axes.rule_axes.get(op.name, op)): op for op in graph.ops}.values():
            for pair in _not_split_together(axes, op, found):
                del found[pair]
    return [(pair[0], inner) for pair, inner in found.items()]


def _not_split_together(
    axes: Axes, op: Op, pairs: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return those pairs (outer, inner) that may not be sharded together because of `op`."""
    rule = axes.rules.get(op.name)
    if rule is None:
        return set()
    atoms = {x: axes.atoms[find(tree).id] for x, tree in axes.rule_axes[op.name].items()}
    every = frozenset[int]().union(*atoms.values())
    fixed = frozenset[int]().union(*(atoms[x] for x in rule.immovable()))
    summed = frozenset[int]().union(*(atoms[x] for x in rule.sum | rule.lookup))
    return {
        (o, i) for o, i in pairs if o in every and i in (fixed if o in summed else fixed | summed)
    }
