"""What a tensor can be on a mesh dim, and which states an op lets its tensors have together.

A state is a set of axes that are sharded, and the sub-axes over which the value or the gradient is
Partial; over each sub-axis that makes one `Kind` of `contract/transitions.py`. An op that computes
with a sharded operand sees its replicated operands with a Partial gradient. Where only some parts
of a concatenation are sharded, the Partial gradient is that of the others.

The mesh dim may be a product of sub-axes (see `sub_axes.py`). All of the above then holds for each
of them by itself: an axis is split over some, a sum is pending over some. A set of sub-axes is a
mask, and where there is one sub-axis all masks are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from shardwright.planner.contract.transitions import GRAD_PARTIAL, Kind, kind_of
from shardwright.planner.graph.axes import ATOM, CONCAT, PRODUCT, Axes, Dim, atoms_of, find
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.sub_axes import SubAxes, find_sub_axes, masks
from shardwright.rules.notation import Dims, Expr, Rule, letters

Shards = frozenset[tuple[int, int, int]]
"""(tensor dim, id of the atom, mask of the sub-axes that split it) of each split axis."""

Cut = frozenset[tuple[int, int]]
"""(id of the atom, mask) of each split axis of one dim."""

OpShards = frozenset[tuple[str, int, int]]
"""(axis of a rule, id of the atom, mask) of each split axis of an op."""


class State(NamedTuple):
    """Sharded axes of a tensor, and the sub-axes over which its value or gradient is Partial."""

    shards: Shards = frozenset()
    partial: int = 0
    grad_partial: int = 0


REPLICATED = State()


def kind_on(state: State, bit: int, covered: int) -> Kind:
    """What a tensor in `state` is on one sub-axis; `covered` is as `States.covered` says."""
    sharded = any(mask & bit for _, _, mask in state.shards)
    return kind_of(
        sharded, bool(covered & bit), bool(state.partial & bit), bool(state.grad_partial & bit)
    )


def cut_of(shards: Shards, dim: int) -> Cut:
    """What of `shards` splits dimension `dim`."""
    return frozenset((a, m) for d, a, m in shards if d == dim)


def made_partial(before: State, after: State) -> bool:
    """Whether `after` is `before` but for sums that became pending: no rank sent anything."""
    return after.partial != 0 and after._replace(partial=0) == before


def looks_new(before: State, after: State) -> bool:
    """Whether a tensor is the same memory behind a change, though autograd sees another one."""
    return before != after and before.shards == after.shards and not before.partial


def cuts(dim: Dim, allowed: frozenset[int]) -> list[frozenset[int]]:
    """Every way to split `dim` once: sets of atom ids, at most one axis in each part of a sum."""
    dim = find(dim)
    if dim.kind == ATOM:
        return [frozenset({dim.id})] if dim.id in allowed else []
    if dim.kind == PRODUCT:
        out = [c for factor in dim.children for c in cuts(factor, allowed)]
        return [c for c in dict.fromkeys(out) if _fits(dim, c)]
    partial: list[frozenset[int]] = [frozenset()]
    for term in dim.children:
        options = [frozenset[int](), *cuts(term, allowed)]
        partial = list(dict.fromkeys(p | o for p in partial for o in options))
        if len(partial) > 256:  # a concatenation of many unlike parts: split all alike or none
            return []
    return [c for c in partial if c and _fits(dim, c)]


def _cut_at_run_time(dim: Dim) -> set[int]:
    """Atoms of the sums in `dim` that have a part of run-time size."""
    dim = find(dim)
    if dim.kind == ATOM:
        return set()
    if dim.kind == CONCAT and any(a.unshardable for a in atoms_of(dim)):
        return {a.id for a in atoms_of(dim)}
    return set().union(*(_cut_at_run_time(c) for c in dim.children))


def _fits(dim: Dim, cut: frozenset[int]) -> bool:
    """Whether splitting every atom of `cut` wherever it stands splits no element twice."""
    return _depth(dim, cut) <= 1


def _depth(dim: Dim, cut: frozenset[int]) -> int:
    dim = find(dim)
    if dim.kind == ATOM:
        return int(dim.id in cut)
    depths = [_depth(c, cut) for c in dim.children]
    return sum(depths) if dim.kind == PRODUCT else max(depths, default=0)


def covers(dim: Dim, cut: Iterable[int]) -> bool:
    """Whether every element of `dim` is split by `cut`."""
    dim, cut = find(dim), frozenset(cut)
    if dim.kind == ATOM:
        return dim.id in cut
    test = any if dim.kind == PRODUCT else all
    return test(covers(c, cut) for c in dim.children)


@dataclass(frozen=True)
class Strategy:
    """One way to run an op: the states of its inputs and outputs, in order, and the split axes."""

    states: tuple[State, ...]
    split: OpShards = frozenset()


Kinds = tuple[Kind, ...]
"""What each tensor of an op is on one sub-axis."""


class States:
    """Domains of all tensors and strategies of all ops of a graph for a mesh dim of `ranks` ranks.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        ranks: Size of the mesh dim; axes shorter than this stay replicated.
        replaceable: Names of the ops whose lookup the runtime can replace.
        forbidden: Per tensor, splits that turned out to be wrong at run time.
        sequence: Axes of run-time size that may be split too.
        sub: The mesh dim as sub-axes; by default as the parameters ask for it.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        ranks: int,
        replaceable: frozenset[str] = frozenset(),
        forbidden: frozenset[tuple[str, Shards]] = frozenset(),
        sequence: OpenSequence | None = None,
        sub: SubAxes | None = None,
    ) -> None:
        self.graph, self.axes, self.ranks = graph, axes, ranks
        self.replaceable, self.forbidden, self.sequence = replaceable, forbidden, sequence
        self.sub = find_sub_axes(graph, axes, ranks) if sub is None else sub
        self._domains: dict[str, tuple[State, ...]] = {}
        self._splits: dict[str, list[Shards]] = {}
        self._cuts: dict[tuple[int, frozenset[int]], list[frozenset[int]]] = {}
        self._covered: dict[tuple[str, Shards], int] = {}

    @cached_property
    def allowed(self) -> dict[int, frozenset[int]]:
        """Mask -> axes that may be split over it: long enough, of parameters, not of run-time size.

        The parts of a dim that is cut at a run-time size (the used and the unused rows of a table
        of positions) are of run-time size themselves.
        """
        fixed: set[int] = set()
        kinds = {id(dims): dims for dims in self.axes.dims.values()}  # like blocks share them
        for dim in {find(d).id: d for dims in kinds.values() for d in dims}.values():
            fixed |= _cut_at_run_time(dim)
        out: dict[int, set[int]] = {self.sub.full: set()}
        for atom, found in masks(self.graph, self.axes, self.sub).items():
            for mask in found if atom not in fixed else ():
                out.setdefault(mask, set()).add(atom)
        return {mask: frozenset(atoms) for mask, atoms in out.items()}

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(u.stored for u in self.graph.uses)

    @cached_property
    def rigid(self) -> frozenset[str]:
        """Stored tensors that stay replicated: buffers, and parameters that the trace does not use.

        A buffer is small and code may swap it: modules take their part of it as they read it, but
        one that is written in place lies as it is used. Of a parameter that is not used nothing is
        known.
        """
        read = {n for op in self.graph.ops for n in op.inputs}
        read |= {b.source for b in self.graph.boundaries}
        written = {used for _, used, _ in self.graph.marks.written}
        uses = (u for u in self.graph.uses if u.used in read)
        used = {u.stored for u in uses if not u.is_buffer or u.used in written}
        return self._stored - used

    def splits(self, name: str) -> list[Shards]:
        """Every way to split tensor `name`, in a fixed order."""
        name = self.graph.one(name)
        if name not in self._splits:
            self._splits[name] = [s for s in self._all(name) if (name, s) not in self.forbidden]
        return self._splits[name]

    def handed(self) -> dict[str, tuple[State, ...]]:
        """The states that hidden states may have where blocks hand them on.

        Whole, so that users get them whole; where sequences are to be split, split along them.
        """
        out = {
            n: tuple(s for s in self.domain(n) if not s.shards and not s.partial)
            for n in sorted(self.graph.marks.carried)
        }
        if self.sequence:
            for name, place in self.sequence.ends.items():
                out[name] = (*out[name], State(frozenset({(*place, self.sub.full)})))
            for name, place in self.sequence.handed.items():
                out[name] = (State(frozenset({(*place, self.sub.full)})),)
        return out

    def _all(self, name: str) -> list[Shards]:
        by_mask = {mask: self._over(name, mask) for mask in self.allowed}
        out = by_mask.pop(self.sub.full)
        for part, major in by_mask.items():
            rest = self.sub.full & ~part
            if part & 1:  # heads over the major sub-axes, alone or with what is inside them
                out += major
                out += [a | b for a in major for b in by_mask.get(rest, ())]
            elif not by_mask.get(rest):  # what is inside them, in a tensor without them
                out += major
        return out

    def _over(self, name: str, mask: int) -> list[Shards]:
        """Every way to split one dim of tensor `name` over the sub-axes of `mask`."""
        out: list[Shards] = []
        for i, dim in enumerate(self.axes.dims[name]):
            if (name, i) not in self.graph.marks.fixed:
                allowed = self.allowed[mask]
                if self.sequence and mask == self.sub.full:
                    allowed |= self.sequence.open(name, i, dim)
                at = (find(dim).id, allowed)  # tensors share their dims
                if at not in self._cuts:
                    self._cuts[at] = cuts(dim, allowed)
                out += [frozenset((i, a, mask) for a in cut) for cut in self._cuts[at]]
        return out

    def covered(self, name: str, shards: Shards) -> int:
        """Mask of the sub-axes over which every element of the tensor is split."""
        if (name, shards) not in self._covered:
            self._covered[name, shards] = sum(
                bit
                for bit in self.sub.bits
                if any(
                    covers(dim, (a for d, a, m in shards if d == i and m & bit))
                    for i, dim in enumerate(self.axes.dims[name])
                )
            )
        return self._covered[name, shards]

    def domain(self, name: str) -> tuple[State, ...]:
        """Every state that tensor `name` can have between ops, in a fixed order."""
        name = self.graph.one(name)
        if name not in self._domains:
            self._domains[name] = self._make_domain(name)
        return self._domains[name]

    def _make_domain(self, name: str) -> tuple[State, ...]:
        if name in self.graph.inputs or name in self.rigid:
            return (REPLICATED,)
        split = self.splits(name)
        if name in self._stored or not self.graph.tensors[name].differentiable:
            return (REPLICATED, *(State(s) for s in split))
        out = [REPLICATED]
        for mask in self.allowed:  # pending over all sub-axes, or over those that split heads
            if mask == self.sub.full or mask & 1:
                out += [State(grad_partial=mask), State(partial=mask)]
        for shards in split:
            cut, covered = mask_of(shards), self.covered(name, shards)
            # Where an axis is split the rest, if there is any, has a Partial gradient.
            rest = cut & ~covered
            out += [State(shards, 0, rest | free) for free in _subsets(self.sub.full & ~cut)]
        return tuple(out)

    def strategies(self, op: Op) -> list[Strategy]:
        """Every way to run `op`, in a fixed order."""
        names = (*op.inputs, *op.outputs)
        domains = [set(self.domain(n)) for n in names]
        known = [{s.shards for s in domain} for domain in domains]
        rule = self.axes.rules.get(op.name)
        found: dict[tuple[State, ...], Strategy] = {}
        for split in self._op_splits(op, rule):
            shards = self._shards(rule, split, len(names))
            if any(s not in k for s, k in zip(shards, known, strict=True)):
                continue
            options = [self._kinds(op, rule, split, shards, bit) for bit in self.sub.bits]
            for chosen in product(*options):
                states = tuple(
                    _with(s, dict(zip(self.sub.bits, kinds, strict=True)))
                    for s, kinds in zip(shards, zip(*chosen, strict=True), strict=True)
                )
                if all(s in d for s, d in zip(states, domains, strict=True)):
                    found.setdefault(states, Strategy(states, split))
        return list(found.values())

    def _op_splits(self, op: Op, rule: Rule | None) -> list[OpShards]:
        """No split, and every one that a split of one of the tensors leads to."""
        found: dict[OpShards, None] = {frozenset(): None}
        if rule is not None:
            trees = self.axes.axes[op.name]
            atoms = {letter: {a.id for a in atoms_of(tree)} for letter, tree in trees.items()}
            sides = (*rule.operands, *rule.results)
            exprs: set[Expr] = {e for dims in sides for e in dims if not isinstance(e, str)}
            for name, dims in zip((*op.inputs, *op.outputs), sides, strict=True):
                for shards in self.splits(name):
                    split = _everywhere(shards, dims, exprs, atoms)
                    if split and split not in found and not self._refuses(op, rule, split):
                        found[split] = None
        return list(found)

    def _refuses(self, op: Op, rule: Rule, split: OpShards) -> bool:
        """Whether the axes in `split` may not be split, whatever the states."""
        used = {x for x, _, _ in split}
        return bool(
            used & rule.immovable()
            or self._moves_a_literal(op, rule, used)
            or (used & rule.lookup and op.name not in self.replaceable)
        )

    @staticmethod
    def _shards(rule: Rule | None, split: OpShards, count: int) -> list[Shards]:
        if rule is None or not split:
            return [frozenset()] * count
        return [shards_of(dims, split) for dims in (*rule.operands, *rule.results)]

    def _kinds(
        self, op: Op, rule: Rule | None, split: OpShards, shards: Sequence[Shards], bit: int
    ) -> list[Kinds]:
        """What is pending over one sub-axis, tensor by tensor: every way that there is."""
        names = (*op.inputs, *op.outputs)
        trained = [self.graph.tensors[n].differentiable for n in names]
        used = {x for x, _, m in split if m & bit}
        if not used:
            each = [kind_of(False, False, False, grad) for grad in trained]
            out = [(Kind.REPLICATE,) * len(names), tuple(each)]
            for group in rule.linear if rule is not None else ():
                sums = {*group, *range(len(op.inputs), len(names))}
                out.append(tuple(Kind.PARTIAL if i in sums else k for i, k in enumerate(each)))
            return list(dict.fromkeys(out))
        assert rule is not None
        here = [frozenset(c for c in s if c[2] & bit) for s in shards]
        reduced = used & (rule.sum | rule.lookup)
        trees = self.axes.axes[op.name]
        if any(
            not covers(trees[x], (a for y, a, m in split if y == x and m & bit)) for x in reduced
        ):
            return []
        if reduced and any(here[len(op.inputs) :]):
            return []
        kinds = []
        for i, name in enumerate(names):
            if reduced and (i >= len(op.inputs) or (not here[i] and _added(rule, i, here))):
                kinds.append(Kind.PARTIAL)
            else:
                covered = bool(self.covered(name, here[i]) & bit)
                kinds.append(kind_of(bool(here[i]), covered, False, trained[i]))
        return [tuple(kinds)]

    @staticmethod
    def _moves_a_literal(op: Op, rule: Rule, used: set[str]) -> bool:
        """Whether a bare number in an index of the model's code would have to change.

        A number counted from the front must not change where something before it is split, one
        counted from the back where something behind it is.
        """
        if not op.literals or not any(x.startswith("p") or x == "k" for x in used):
            return False
        before, kept, behind = "p0" in used, "k" in used, "p2" in used
        for bound in op.literals:
            value = op.call.arguments.get(
                {"start": "start", "stop": "end", "index": "index"}[bound]
            )
            if value is None or value >= 2**62 or (bound == "start" and value == 0):
                continue
            front = before or (kept and bound == "stop")
            back = behind or (kept and bound != "stop")
            if front if value >= 0 else back:
                return True
        return False


def mask_of(shards: Shards) -> int:
    """The sub-axes that split anything."""
    out = 0
    for _, _, mask in shards:
        out |= mask
    return out


def _subsets(mask: int) -> list[int]:
    """Every mask within `mask`, in ascending order."""
    return [m for m in range(mask + 1) if m & ~mask == 0]


def _with(shards: Shards, kinds: Mapping[int, Kind]) -> State:
    """The state with these shards that is of these kinds, per sub-axis."""
    return State(
        shards,
        sum(bit for bit, kind in kinds.items() if kind == Kind.PARTIAL),
        sum(bit for bit, kind in kinds.items() if kind in GRAD_PARTIAL),
    )


def _added(rule: Rule, operand: int, shards: Sequence[Shards]) -> bool:
    """Whether `operand` is added to one that is split."""
    return any(operand in group and any(shards[j] for j in group) for group in rule.linear)


def _everywhere(
    shards: Shards, dims: Dims, exprs: set[Expr], atoms: Mapping[str, set[int]]
) -> OpShards:
    """The axes of a rule that are split when a tensor written as `dims` is split into `shards`.

    An atom that stands in several parts of a dim (the heads of a fused q, k and v) is split in all
    of them, so a result that is one part of an operand determines the others.
    """
    split = {(x, a, m) for d, a, m in shards for x in letters(dims[d]) if a in atoms[x]}
    while True:
        more = {
            (x, a, m)
            for expr in exprs
            for a, m in {(b, n) for y, b, n in split if y in set(letters(expr))}
            for x in letters(expr)
            if a in atoms[x]
        }
        if more <= split:
            return frozenset(split)
        split |= more


def shards_of(dims: Dims, split: OpShards) -> Shards:
    """The split axes of a tensor whose dims are written as `dims` in the rule."""
    return frozenset(
        (d, a, m)
        for d, expr in enumerate(dims)
        for x in letters(expr)
        for y, a, m in split
        if x == y
    )
