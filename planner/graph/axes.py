"""Refine tensor dims into axes: the atoms that may be sharded, and how dims are composed of them.

A dim is an atom, a product of dims (major to minor) or a concatenation (sum) of dims. Rules say
which dims are the same. Unifying two dims refines both until they agree. Union-find carries a
refinement to every tensor that shares the dim, so one pass over the graph in any order is enough.
Dims without a common refinement stay replicated, and the op of the conflict is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import prod

from shardwright.planner.graph.graph import Graph, Op, Slot
from shardwright.rules.notation import ONE, Dims, Expr, Rule, letters
from shardwright.rules.notation import Concat as ConcatExpr
from shardwright.rules.registry import rule_for

ATOM, PRODUCT, CONCAT = "atom", "product", "concat"

MAX_EQUAL_TERMS = 64
"""A dim that `roll` shifts is cut into at most this many equal terms."""


class NoCommonRefinement(Exception):
    """Two dims have no common refinement."""


class Dim:
    """A union-find node; after `find` it is an atom, a product or a concatenation.

    Dims are compared and hashed by identity. A `solid` atom is never refined: an attempt to refine
    it is a conflict.
    """

    __slots__ = ("children", "id", "kind", "parent", "size", "solid", "unshardable")
    _ids = count()

    def __init__(self, size: int, kind: str = ATOM, children: Sequence[Dim] = ()) -> None:
        self.size, self.kind, self.children = size, kind, list(children)
        self.parent: Dim | None = None
        self.unshardable = self.solid = False
        self.id = next(Dim._ids)

    def __repr__(self) -> str:
        me = find(self)
        if me.kind == ATOM:
            return f"{me.size}#{me.id}"
        return "(" + (" * " if me.kind == PRODUCT else " + ").join(map(repr, me.children)) + ")"


def find(dim: Dim) -> Dim:
    """Return the union-find root of `dim`."""
    root = dim
    while root.parent is not None:
        root = root.parent
    while dim is not root:
        dim.parent, dim = root, dim.parent  # type: ignore[assignment]
    return root


def leaves_of(dim: Dim) -> list[Dim]:
    """Return the atoms of `dim`, left to right. An atom may occur twice."""
    dim = find(dim)
    if dim.kind == ATOM:
        return [dim]
    leaves: list[Dim] = []
    for child in dim.children:
        if child.parent is not None:
            child = find(child)
        if child.kind == ATOM:
            leaves.append(child)
        else:
            leaves += leaves_of(child)
    return leaves


def factors_of(dim: Dim) -> Iterator[Dim]:
    """Yield the atoms and concatenations that `dim` is a product of, major to minor."""
    dim = find(dim)
    if dim.kind == PRODUCT:
        for child in dim.children:
            yield from factors_of(child)
    else:
        yield dim


def atoms_of(dim: Dim) -> list[Dim]:
    """Return the atoms of `dim` that are longer than 1 and could be sharded."""
    return [atom for atom in leaves_of(dim) if atom.size > 1]


def product(factors: Sequence[Dim]) -> Dim:
    """Return the product of `factors`, or the only factor that is longer than 1."""
    kept = [f for f in factors if f.size > 1]
    return kept[0] if len(kept) == 1 else Dim(prod(f.size for f in kept), PRODUCT, kept)


def _link(dim: Dim, target: Dim) -> None:
    dim, target = find(dim), find(target)
    if dim is target:
        return
    if dim.kind == ATOM and any(a is dim for a in atoms_of(target)):
        raise NoCommonRefinement(f"{dim!r} would contain itself in {target!r}")
    if dim.solid and target.kind != ATOM:
        raise NoCommonRefinement(f"{dim!r} may not be refined to {target!r}")
    target.unshardable |= dim.unshardable
    target.solid |= dim.solid
    dim.parent = target


def _factors(dim: Dim) -> list[Dim]:
    """Return the factors of `dim` that are not of length 1."""
    return [f for f in factors_of(dim) if f.size != 1]


def split_minor(dim: Dim, minor: int) -> tuple[Dim | None, Dim]:
    """Refine `dim` into major * minor. Major is None if `dim` has the size of minor."""
    dim = find(dim)
    if dim.size == minor:
        return None, dim
    if dim.size % minor:
        raise NoCommonRefinement(f"{minor} does not divide {dim!r}")
    if dim.solid:
        raise NoCommonRefinement(f"{dim!r} may not be refined")
    if dim.kind == ATOM:
        major, rest = Dim(dim.size // minor), Dim(minor)
        major.unshardable = rest.unshardable = dim.unshardable
        dim.kind, dim.children = PRODUCT, [major, rest]
        return major, rest
    if dim.kind == PRODUCT:
        factors, tail = _factors(dim), []
        have = 1
        while factors and minor % (have * factors[-1].size) == 0:
            have *= factors[-1].size
            tail.insert(0, factors.pop())
        if have < minor:
            major, rest = split_minor(factors.pop(), minor // have)
            factors += [] if major is None else [major]
            tail.insert(0, rest)
        return product(factors) if factors else None, product(tail)
    parts = [split_minor(term, minor) for term in dim.children]
    for _, rest in parts[1:]:
        unify(parts[0][1], rest)
    major = Dim(dim.size // minor, CONCAT, [m or Dim(1) for m, _ in parts])
    _link(dim, Dim(dim.size, PRODUCT, [major, parts[0][1]]))
    return major, parts[0][1]


def _unify_factors(left: list[Dim], right: list[Dim]) -> None:
    left, right = list(left), list(right)
    while left and right:
        a, b = find(left.pop()), find(right.pop())
        if PRODUCT in (a.kind, b.kind):
            left += _factors(a)
            right += _factors(b)
        elif a.size == b.size:
            unify(a, b)
        elif a.size > b.size:
            major, minor = split_minor(a, b.size)
            unify(minor, b)
            left += [major] if major else []
        else:
            major, minor = split_minor(b, a.size)
            unify(minor, a)
            right += [major] if major else []
    if any(d.size > 1 for d in left + right):
        raise NoCommonRefinement("the sizes of the factors do not match")


def split_concat(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """Refine `dim` into a concatenation of parts of these sizes and return the parts.

    Raises:
        NoCommonRefinement: `dim` cannot be cut at these places.
    """
    dim = find(dim)
    if len(sizes) == 1:
        return [dim]
    if dim.solid:
        raise NoCommonRefinement(f"{dim!r} may not be cut")
    if dim.kind == ATOM:
        parts = [Dim(s) for s in sizes]
        for made in parts:
            made.unshardable = dim.unshardable
        dim.kind, dim.children = CONCAT, parts
        return parts
    if dim.kind == PRODUCT:
        factors = _factors(dim)
        inner = prod(f.size for f in factors[1:])
        if any(s % inner for s in sizes):
            raise NoCommonRefinement(f"parts of {list(sizes)} cut through {dim!r}")
        return [
            product([t, *factors[1:]])
            for t in split_concat(factors[0], [s // inner for s in sizes])
        ]
    queue, terms, out = list(dim.children), [], []
    for size in sizes:
        part: list[Dim] = []
        need = size
        while need:
            term = find(queue.pop(0))
            if term.size > need:
                first, rest = split_concat(term, [need, term.size - need])
                queue.insert(0, rest)
                term = first
            part.append(term)
            need -= term.size
        terms += part
        out.append(part[0] if len(part) == 1 else Dim(size, CONCAT, part))
    dim.children = terms
    return out


def unify(a: Dim, b: Dim) -> None:
    """Make `a` and `b` the same dim by refining both.

    Raises:
        NoCommonRefinement: they have no common refinement.
    """
    a, b = find(a), find(b)
    if a is b:
        return
    if a.size != b.size:
        raise NoCommonRefinement(f"{a!r} and {b!r} differ in size")
    if b.kind == ATOM and a.kind != ATOM:
        a, b = b, a
    if a.kind == ATOM:
        _link(a, b)
    elif a.kind == b.kind == PRODUCT:
        _unify_factors(_factors(a), _factors(b))
        _link(a, b)
    elif a.kind == b.kind == CONCAT:
        _refuse_short_shift(a, b)
        parts = split_concat(a, [t.size for t in b.children])
        for part, term in zip(parts, list(find(b).children), strict=True):
            unify(part, term)
        _link(a, b)
    else:
        if a.kind == CONCAT:
            a, b = b, a
        _unify_product_concat(a, b)


def _refuse_short_shift(a: Dim, b: Dim) -> None:
    """Raise a conflict if a long term is in both, a few places apart.

    It would become that many equal terms: a sequence that is shifted by one, one for each token.
    """
    places = {id(term): place for term, place in reversed([*_places(a)])}
    for term, place in _places(b):
        apart = abs(place - places.get(id(term), place))
        if 0 < apart * MAX_EQUAL_TERMS < term.size:
            raise NoCommonRefinement(f"{term.size} are in both, {apart} places apart")


def _places(dim: Dim) -> Iterator[tuple[Dim, int]]:
    """Yield the terms of a concatenation, also of those in it, and where each begins."""
    place = 0
    for term in map(find, dim.children):
        inner = _places(term) if term.kind == CONCAT else [(term, 0)]
        yield from ((leaf, place + at) for leaf, at in inner)
        place += term.size


def _unify_product_concat(a: Dim, b: Dim) -> None:
    factors = _factors(a)
    outer, rest = factors[0], product(factors[1:])
    if len(b.children) == outer.size and all(t.size == rest.size for t in b.children):
        for term in list(b.children):  # the outer factor is the number of equal terms
            unify(term, rest)
        if find(outer).kind == ATOM:
            outer = find(outer)
            outer.kind, outer.children = CONCAT, [Dim(1) for _ in b.children]
        _link(b, a)
        return
    major, minor = split_minor(b, factors[-1].size)
    unify(minor, factors[-1])
    if major is not None:
        unify(major, product(factors[:-1]))
    if find(a) is not find(b):
        _link(a, b)


@dataclass(eq=False)
class Axes:
    """Dims of every tensor and of every axis of every op's rule, by tensor name and op name."""

    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    rule_axes: dict[str, dict[str, Dim]] = field(default_factory=dict)
    rules: dict[str, Rule | None] = field(default_factory=dict)
    conflicts: list[tuple[Op, str]] = field(default_factory=list)

    @cached_property
    def atoms(self) -> dict[int, frozenset[int]]:
        """The ids of the atoms of each dim, as `atoms_of` has them, once the axes are refined."""
        dims = {id(found): found for found in self.dims.values()}  # equal blocks share dims
        trees = {id(found): found.values() for found in self.rule_axes.values()}
        roots = {find(d).id: d for found in (*dims.values(), *trees.values()) for d in found}
        sets = {n: frozenset(a.id for a in atoms_of(d)) for n, d in roots.items()}
        one = {found: found for found in sets.values()}  # many are equal
        return {n: one[found] for n, found in sets.items()}

    def sides(self, op: Op) -> list[tuple[str, Dims]]:
        """Return (tensor, dims in the op's rule) per operand and result; empty without a rule."""
        rule = self.rules.get(op.name)
        if rule is None:
            return []
        return [
            *zip(op.inputs, rule.operands, strict=True),
            *zip(op.outputs, rule.results, strict=True),
        ]

    def parts(self, op: Op) -> Iterator[Dim]:
        """Yield the dims that are parts of others in the rule of an op."""
        exprs = (expr for _, dims in self.sides(op) for expr in dims)
        terms = (term for e in exprs if isinstance(e, ConcatExpr) for term in e.terms)
        yield from (self.rule_axes[op.name][x] for term in terms for x in letters(term))


def refine(graph: Graph, solid: int | None = None) -> Axes:
    """Refine all dims of `graph`; atoms with run-time sizes (those of inputs) are unshardable.

    Args:
        graph: The traced model.
        solid: A run-time size that may be sharded. Dims of this size are never cut into parts
            (for example all positions but the last), because nothing could be sharded then.
    """
    out = Axes()
    shared = {u.used: u.stored for u in graph.uses} | {b.target: b.source for b in graph.boundaries}
    shared |= graph.alike
    linked = [(b.source, b.target) for b in graph.boundaries if b.target in graph.alike]
    for name, tensor in graph.tensors.items():
        if name not in shared:
            out.dims[name] = tuple(Dim(s) for s in tensor.shape)
            for dim in out.dims[name]:
                dim.solid = dim.size == solid
    for name in graph.tensors:
        root = name
        while root in shared:
            root = shared[root]
        out.dims[name] = out.dims[root]
    for source, target in linked:
        for a, b in zip(out.dims[source], out.dims[target], strict=True):
            unify(a, b)
    _unify_repeated_slots(graph, out)
    _unify_handed_on(graph, out)
    for name in graph.inputs:
        for at, dim in enumerate(out.dims[name]):
            dim.unshardable = (name, at) not in graph.marks.sized
    first: dict[tuple[str, ...], Op] = {}
    for op in graph.ops:
        like = first.setdefault(tuple(map(graph.representative, (*op.inputs, *op.outputs))), op)
        if like is not op and like.call == op.call and like.name in out.rule_axes:
            _share_rule(op, like, out)
            continue
        rule = out.rules[op.name] = rule_for(op.call)
        if rule is not None:
            _unify_with_rule(op, rule, out)
        else:
            _unify_by_length(op, graph.inputs, out)
    return out


def _share_rule(op: Op, like: Op, out: Axes) -> None:
    """Give `op` of a folded block the rule and axes of `like`: their tensors share dims."""
    out.rules[op.name], out.rule_axes[op.name] = out.rules[like.name], out.rule_axes[like.name]
    out.conflicts += [(op, text) for of, text in out.conflicts if of is like]


def _unify_by_length(op: Op, inputs: Sequence[str], out: Axes) -> None:
    """Unify outputs of an op without a rule with input dims of run-time size, by length."""
    given = (find(d) for name in (*op.inputs, *inputs) for d in out.dims[name])
    varying: dict[int, Dim] = {}
    for dim in given:
        if dim.size > 1 and all(a.unshardable for a in atoms_of(dim)):
            varying.setdefault(dim.size, dim)
    for name in op.outputs:
        for dim in out.dims[name]:
            if dim.size in varying:
                with suppress(NoCommonRefinement):  # the dim is refined already
                    unify(dim, varying[dim.size])


def _unify_repeated_slots(graph: Graph, out: Axes) -> None:
    """Unify the dims of tensors in one slot where sizes agree: calls share one reshard."""
    first: dict[Slot, str] = {}
    for boundary in graph.boundaries:
        slot = graph.slot(boundary)
        one, other = out.dims[first.setdefault(slot, boundary.source)], out.dims[boundary.source]
        if [d.size for d in one] == [d.size for d in other]:
            for a, b in zip(one, other, strict=True):
                unify(a, b)


def _unify_handed_on(graph: Graph, out: Axes) -> None:
    """Unify the dims of what runs of a loop hand on, where sizes agree."""
    for before, after in sorted(graph.marks.handed_on):
        for a, b in zip(out.dims[before], out.dims[after], strict=False):
            if a.size == b.size:
                unify(a, b)


def _unify_with_rule(op: Op, rule: Rule, out: Axes) -> None:
    axes = out.rule_axes[op.name] = {name: Dim(rule.sizes.get(name, 1)) for name in rule.axes()}
    for name, dims in out.sides(op):
        for dim, expr in zip(out.dims[name], dims, strict=True):
            if expr == ONE or dim.size <= 1:
                continue
            try:
                if isinstance(expr, ConcatExpr):
                    parts = [_build(t, axes) for t in expr.terms]
                    places = split_concat(dim, [p.size for p in parts])
                    for part, term in zip(places, parts, strict=True):
                        unify(part, term)
                else:
                    unify(dim, _build(expr, axes))
            except NoCommonRefinement as conflict:
                out.conflicts.append((op, str(conflict)))
                for root in [dim, *(axes[a] for a in letters(expr))]:
                    for atom in [find(root), *atoms_of(root)]:
                        atom.unshardable = True


def _build(expr: Expr, axes: dict[str, Dim]) -> Dim:
    if isinstance(expr, str):
        return Dim(1) if expr == ONE else axes[expr]
    if isinstance(expr, ConcatExpr):
        parts = [_build(t, axes) for t in expr.terms]
        return Dim(sum(p.size for p in parts), CONCAT, parts)
    return product([_build(f, axes) for f in expr.factors])
