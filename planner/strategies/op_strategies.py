"""Strategies of ops: which states the tensors of an op may have together.

If an op computes with a sharded operand, its replicated operands have a Partial gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import contains

from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.transitions import Kind, kind_of
from shardwright.planner.graph.axes import atoms_of
from shardwright.planner.graph.graph import Op, once_a_graph
from shardwright.planner.strategies.cuts import covers
from shardwright.planner.strategies.state import Shards, State, flagged, flags
from shardwright.planner.strategies.states import States
from shardwright.rules.notation import Dims, Expr, Rule, letters

OpShards = frozenset[tuple[str, int, int]]
"""(axis of the rule, id of the atom, mask of sub-axes) of each split axis of an op."""


@dataclass(frozen=True)
class Strategy:
    """One way to run an op: the states of its inputs and outputs, in order, and the split axes."""

    states: tuple[State, ...]
    split: OpShards = frozenset()


Kinds = tuple[Kind, ...]
"""The kind of each tensor of an op on one sub-axis."""


class Strategies:
    """The strategies of ops, computed once for ops that are alike, and for meshes that are."""

    def __init__(self, states: States) -> None:
        self.states, sub = states, states.sub
        self._known = known_strategies(states.graph, states.axes, sub.bits, sub.along)

    def of(self, op: Op) -> list[Strategy]:
        """Return all strategies of `op`, in a fixed order. Ops that are alike share one list."""
        return made_once(self._known, self._kind(op), lambda: _strategies(self.states, op))

    def _kind(self, op: Op) -> object:
        """Return a key of everything that the strategies of `op` depend on."""
        states, rule = self.states, self.states.axes.rules.get(op.name)
        names = (*op.inputs, *op.outputs)
        tensors = [
            (id(states.domain(n)), states.dims(n), states.graph.tensors[n].differentiable)
            for n in names
        ]
        if rule is None:
            return len(op.inputs), *tensors
        trees = states.axes.rule_axes[op.name]
        moved = str(op.call) if op.literals else "", op.literals, op.name in states.replaceable
        return str(rule), *moved, *((x, states.root(tree)) for x, tree in trees.items()), *tensors


@once_a_graph
def known_strategies(*_: object) -> dict[object, list[Strategy]]:
    """Return the table of the strategies that were found with these axes and masks of sub-axes."""
    return {}


def _strategies(states: States, op: Op) -> list[Strategy]:
    names = (*op.inputs, *op.outputs)
    domains = [set(states.domain(n)) for n in names]
    known = [{s.shards for s in domain} for domain in domains]
    rule = states.axes.rules.get(op.name)
    given = states, op, rule
    found: dict[tuple[State, ...], Strategy] = {}
    for split in _op_splits(states, op, rule):
        shards = _shards(rule, split, len(names))
        if any(s not in k for s, k in zip(shards, known, strict=True)):
            continue
        options = [
            [[flags(kind, bit) for kind in kinds] for kinds in _kinds(*given, split, shards, bit)]
            for bit in states.sub.bits
        ]
        for chosen in product(*options):
            pending = zip(*chosen, strict=True)  # per tensor its flags on each sub-axis
            row = tuple([flagged(s, f) for s, f in zip(shards, pending, strict=True)])
            if all(map(contains, domains, row)):
                found.setdefault(row, Strategy(row, split))
    return list(found.values())


def _op_splits(states: States, op: Op, rule: Rule | None) -> list[OpShards]:
    """Return the empty split, and every split that follows from a split of one of the tensors."""
    found: dict[OpShards, None] = {frozenset(): None}
    if rule is not None:
        trees = states.axes.rule_axes[op.name]
        atoms = {letter: {a.id for a in atoms_of(tree)} for letter, tree in trees.items()}
        sides = (*rule.operands, *rule.results)
        exprs: set[Expr] = {e for dims in sides for e in dims if not isinstance(e, str)}
        for name, dims in zip((*op.inputs, *op.outputs), sides, strict=True):
            for shards in states.splits(name):
                split = _everywhere(shards, dims, exprs, atoms)
                if split and split not in found and not _refuses(states, op, rule, split):
                    found[split] = None
    cp = states.sub.along
    along = [s for s in found if s and all(m == cp for *_, m in s)]
    across = [s for s in found if s and not any(m & cp for *_, m in s)]
    return list(found | dict.fromkeys(a | b for a, b in product(across, along)))


def _refuses(states: States, op: Op, rule: Rule, split: OpShards) -> bool:
    """Whether the axes in `split` may not be split, whatever the states."""
    used = {x for x, _, _ in split}
    return bool(
        used & rule.immovable()
        or _moves_a_literal(op, used)
        or (used & rule.lookup and op.name not in states.replaceable)
    )


def _shards(rule: Rule | None, split: OpShards, count: int) -> list[Shards]:
    if rule is None or not split:
        return [frozenset()] * count
    return [shards_of(dims, split) for dims in (*rule.operands, *rule.results)]


def _kinds(
    states: States, op: Op, rule: Rule | None, split: OpShards, shards: Sequence[Shards], bit: int
) -> list[Kinds]:
    """Return all possible kinds of the tensors on one sub-axis, given the split axes."""
    names = (*op.inputs, *op.outputs)
    trained = [states.graph.tensors[n].differentiable for n in names]
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
    trees = states.axes.rule_axes[op.name]
    if any(not covers(trees[x], (a for y, a, m in split if y == x and m & bit)) for x in reduced):
        return []
    if reduced and any(here[len(op.inputs) :]):
        return []
    kinds = []
    for i, name in enumerate(names):
        if reduced and (i >= len(op.inputs) or (not here[i] and _added(rule, i, here))):
            kinds.append(Kind.PARTIAL)
        else:
            covered = bool(states.covered(name, here[i]) & bit)
            kinds.append(kind_of(bool(here[i]), covered, False, trained[i]))
    return [tuple(kinds)]


def _moves_a_literal(op: Op, used: set[str]) -> bool:
    """Whether a literal number in an index of the model's code would have to change.

    A number counted from the front would change if something before it is split; a number counted
    from the back, if something behind it is split.
    """
    if not op.literals or not any(x.startswith("p") or x == "k" for x in used):
        return False
    before, kept, behind = "p0" in used, "k" in used, "p2" in used
    for bound in op.literals:
        value = op.call.arguments.get({"start": "start", "stop": "end", "index": "index"}[bound])
        if value is None or value >= 2**62 or (bound == "start" and value == 0):
            continue
        front = before or (kept and bound == "stop")
        back = behind or (kept and bound != "stop")
        if front if value >= 0 else back:
            return True
    return False


def _added(rule: Rule, operand: int, shards: Sequence[Shards]) -> bool:
    """Whether `operand` is added to an operand that is split."""
    return any(operand in group and any(shards[j] for j in group) for group in rule.linear)


def _everywhere(
    shards: Shards, dims: Dims, exprs: set[Expr], atoms: Mapping[str, set[int]]
) -> OpShards:
    """Return the split axes of a rule if a tensor written as `dims` is split into `shards`.

    An atom that is in several parts of a dim (the heads of a fused q, k and v) is split in all of
    them. So the split of a result that is one part of an operand determines the other parts.
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
    """Return the shards of a tensor whose dims are written as `dims` in the rule."""
    return frozenset(
        (d, a, m)
        for d, expr in enumerate(dims)
        for x in letters(expr)
        for y, a, m in split
        if x == y
    )
