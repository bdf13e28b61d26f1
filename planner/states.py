"""What a tensor can be on one mesh dim, and which states an op lets its tensors have together.

A state is a set of axes that are split, and what is pending: nothing, a sum of the value (each rank
holds one term), or a sum of the gradient (each rank holds the value, and computes one term of its
gradient). An op that computes with a split operand sees its whole operands with a pending gradient.
Where only some parts of a concatenation are split, the pending gradient is that of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwright.planner.axes import ATOM, PRODUCT, SUM, Axes, Dim, atoms_of, find
from shardwright.planner.graph import Graph, Op
from shardwright.planner.sequence import OpenSequence
from shardwright.rules.notation import Dims, Expr, Rule, letters

NOTHING, VALUE, GRADIENT = "", "value", "gradient"

Shards = frozenset[tuple[int, int]]
"""(tensor dim, id of the atom) of each split axis."""


class State(NamedTuple):
    """Split axes and the pending sum of a tensor on one mesh dim."""

    shards: Shards
    pending: str


WHOLE = State(frozenset(), NOTHING)
PARTIAL = State(frozenset(), VALUE)
COPIED = State(frozenset(), GRADIENT)


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
    if dim.kind == SUM and any(a.whole for a in atoms_of(dim)):
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
class Mode:
    """One way to run an op: the states of its inputs and outputs, in order, and the split axes."""

    states: tuple[State, ...]
    split: frozenset[tuple[str, int]] = frozenset()


class States:
    """Domains of all tensors and modes of all ops of a graph for a mesh dim of `ranks` ranks.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        ranks: Size of the mesh dim; axes shorter than this stay whole.
        replaceable: Names of the ops whose lookup the runtime can replace.
        forbidden: Per tensor, splits that turned out to be wrong at run time.
        sequence: Axes of run-time size that may be split too.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        ranks: int,
        replaceable: frozenset[str] = frozenset(),
        forbidden: frozenset[tuple[str, Shards]] = frozenset(),
        sequence: OpenSequence | None = None,
    ) -> None:
        self.graph, self.axes, self.ranks = graph, axes, ranks
        self.replaceable, self.forbidden, self.sequence = replaceable, forbidden, sequence
        self._domains: dict[str, tuple[State, ...]] = {}

    @cached_property
    def allowed(self) -> frozenset[int]:
        """Axes that may be split: those of parameters, long enough, and not of run-time size.

        The parts of a dim that is cut at a run-time size (the used and the unused rows of a table
        of positions) are of run-time size themselves.
        """
        fixed: set[int] = set()
        for dims in self.axes.dims.values():
            for dim in dims:
                fixed |= _cut_at_run_time(dim)
        out = set()
        for use in self.graph.uses:
            for dim in self.axes.dims[use.stored]:
                if not use.is_buffer and not find(dim).whole:
                    out |= {a.id for a in atoms_of(dim) if not a.whole and a.size >= self.ranks}
        return frozenset(out - fixed)

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(u.stored for u in self.graph.uses)

    @cached_property
    def _rigid(self) -> frozenset[str]:
        """Stored tensors that stay whole: buffers, and parameters that the trace does not use.

        A buffer is small and code may swap it: modules take their part of it as they read it. Of
        a parameter that is not used nothing is known.
        """
        read = {n for op in self.graph.ops for n in op.inputs}
        read |= {b.source for b in self.graph.borders}
        used = {u.stored for u in self.graph.uses if u.used in read and not u.is_buffer}
        return self._stored - used

    def splits(self, name: str) -> list[Shards]:
        """Every way to split tensor `name`, in a fixed order."""
        out: list[Shards] = []
        for i, dim in enumerate(self.axes.dims[name]):
            if (name, i) not in self.graph.fixed:
                opened = self.sequence.open(name, i, dim) if self.sequence else frozenset()
                allowed = self.allowed | opened
                out += [frozenset((i, a) for a in cut) for cut in cuts(dim, allowed)]
        one = self.graph.one(name)
        return [s for s in out if (one, s) not in self.forbidden]

    def handed(self) -> dict[str, tuple[State, ...]]:
        """The states that hidden states may have where blocks hand them on.

        Whole, so that users get them whole; where sequences are to be split, split along them.
        """
        out: dict[str, tuple[State, ...]] = {n: (WHOLE, COPIED) for n in sorted(self.graph.carried)}
        if self.sequence:
            for name, place in self.sequence.ends.items():
                out[name] = (WHOLE, COPIED, State(frozenset({place}), NOTHING))
            for name, place in self.sequence.handed.items():
                out[name] = (State(frozenset({place}), NOTHING),)
        return out

    def covered(self, name: str, shards: Shards) -> bool:
        """Whether every element of the tensor is split."""
        return any(
            covers(dim, (a for d, a in shards if d == i))
            for i, dim in enumerate(self.axes.dims[name])
        )

    def domain(self, name: str) -> tuple[State, ...]:
        """Every state that tensor `name` can have between ops, in a fixed order."""
        name = self.graph.one(name)
        if name not in self._domains:
            self._domains[name] = self._make_domain(name)
        return self._domains[name]

    def _make_domain(self, name: str) -> tuple[State, ...]:
        if name in self.graph.inputs or name in self._rigid:
            return (WHOLE,)
        split = self.splits(name)
        if name in self._stored or not self.graph.tensors[name].differentiable:
            return (WHOLE, *(State(s, NOTHING) for s in split))
        return (WHOLE, COPIED, PARTIAL, *(self.computed(name, s) for s in split))

    def computed(self, name: str, shards: Shards) -> State:
        """The state of a tensor that an op splits this way; none split: its gradient is pending."""
        pending = self.graph.tensors[name].differentiable and not (
            shards and self.covered(name, shards)
        )
        return State(shards, GRADIENT if pending else NOTHING)

    def modes(self, op: Op) -> list[Mode]:
        """Every way to run `op`, in a fixed order."""
        names = (*op.inputs, *op.outputs)
        domains = [set(self.domain(n)) for n in names]
        whole = tuple(WHOLE for _ in names)
        copied = tuple(self.computed(n, frozenset()) for n in names)
        found = {whole: Mode(whole), copied: Mode(copied)}
        rule = self.axes.rules.get(op.name)
        if rule is not None:
            for mode in [*self._split_modes(op, rule), *self._linear_modes(op, rule)]:
                found.setdefault(mode.states, mode)
        return [
            m for m in found.values() if all(s in d for s, d in zip(m.states, domains, strict=True))
        ]

    def _linear_modes(self, op: Op, rule: Rule) -> Iterator[Mode]:
        for group in rule.linear:
            inputs = [
                PARTIAL if i in group else self.computed(n, frozenset())
                for i, n in enumerate(op.inputs)
            ]
            yield Mode((*inputs, *(PARTIAL for _ in op.outputs)))

    def _split_modes(self, op: Op, rule: Rule) -> Iterator[Mode]:
        trees, seen = self.axes.axes[op.name], set()
        atoms = {letter: {a.id for a in atoms_of(tree)} for letter, tree in trees.items()}
        sides = (*rule.operands, *rule.results)
        exprs: set[Expr] = {e for dims in sides for e in dims if not isinstance(e, str)}
        for name, dims in zip((*op.inputs, *op.outputs), sides, strict=True):
            for shards in self.splits(name):
                split = _everywhere(shards, dims, exprs, atoms)
                if split and split not in seen:
                    seen.add(split)
                    states = self._split_states(op, rule, split)
                    if states is not None:
                        yield Mode(states, split)

    def _split_states(
        self, op: Op, rule: Rule, split: frozenset[tuple[str, int]]
    ) -> tuple[State, ...] | None:
        """States of all tensors when the axes in `split` are split; None where that cannot be."""
        trees, used = self.axes.axes[op.name], {x for x, _ in split}
        if used & rule.immovable() or self._moves_a_literal(op, rule, used):
            return None
        if used & rule.lookup and op.name not in self.replaceable:
            return None
        reduced = used & (rule.sum | rule.lookup)
        if any(not covers(trees[x], (a for y, a in split if y == x)) for x in reduced):
            return None
        operands = [shards_of(dims, split) for dims in rule.operands]
        results = [shards_of(dims, split) for dims in rule.results]
        if reduced and any(results):
            return None
        states = []
        for i, (name, shards) in enumerate(zip(op.inputs, operands, strict=True)):
            added = (
                reduced
                and not shards
                and any(i in g and any(operands[j] for j in g) for g in rule.linear)
            )
            states.append(PARTIAL if added else self.computed(name, shards))
        for name, shards in zip(op.outputs, results, strict=True):
            states.append(PARTIAL if reduced else self.computed(name, shards))
        return tuple(states)

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


def _everywhere(
    shards: Shards, dims: Dims, exprs: set[Expr], atoms: Mapping[str, set[int]]
) -> frozenset[tuple[str, int]]:
    """The axes of a rule that are split when a tensor written as `dims` is split into `shards`.

    An atom that stands in several parts of a dim (the heads of a fused q, k and v) is split in all
    of them, so a result that is one part of an operand determines the others.
    """
    split = {(x, a) for d, a in shards for x in letters(dims[d]) if a in atoms[x]}
    while True:
        more = {
            (x, a)
            for expr in exprs
            for a in {b for y, b in split if y in set(letters(expr))}
            for x in letters(expr)
            if a in atoms[x]
        }
        if more <= split:
            return frozenset(split)
        split |= more


def shards_of(dims: Dims, split: frozenset[tuple[str, int]]) -> Shards:
    """The split axes of a tensor whose dims are written as `dims` in the rule."""
    return frozenset(
        (d, a) for d, expr in enumerate(dims) for x in letters(expr) for y, a in split if x == y
    )
