"""Checks a plan independently of the solver: every op of the unfolded graph must hold.

The check reads the rules, but not the network, its presolve or any solver. For each op it decides
from the states alone whether the rule allows them together. The network is posed by a few of the
same predicates: `handed`, `misplaced`, `attends`, `writable`, `covers`. The costs are in
`recost.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.errors import SolverError
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.transitions import Kind, kind_of
from shardwright.planner.graph.axes import atoms_of
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Boundary, Graph, Op, Slot
from shardwright.planner.graph.marks import KINDS, Demand
from shardwright.planner.graph.repeated_calls import Sizes
from shardwright.planner.strategies.cuts import covers
from shardwright.planner.strategies.op_strategies import OpShards
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.state import REPLICATED, Shards, State, kind_on, mask_of
from shardwright.planner.strategies.states import States
from shardwright.rules.notation import Dims, Rule, letters

Assignment = Mapping[str, State]


def check(
    graph: Graph,
    states: States,
    assignment: Assignment,
    rigid: Collection[str] = (),
    ops: Iterable[Op] | None = None,
) -> None:
    """Check every op, boundary, use, input and output of the unfolded graph.

    `recost.py` prices redistributions, and raises an error if one is not possible.

    Args:
        graph: The traced model.
        states: Its axes, and the sub-axes that cover a tensor.
        assignment: The plan.
        rigid: Modules at whose boundaries no tensor may be redistributed.
        ops: One op of each kind, if known: see `distinct`.

    Raises:
        SolverError: the plan does not hold; the message names the op and the place.
    """
    for op in ops or (op for op, _ in distinct(graph, states, assignment)):
        if (why := _wrong(op, states, assignment)) is not None:
            raise SolverError(
                f"the plan does not hold at {op.call.op} in '{op.module}' ({op.source}): {why}; "
                "this is a mistake of the planner: please report it"
            )
    _check_boundaries(graph, states, assignment, rigid)
    for name in graph.inputs:
        if assignment[name] != REPLICATED:
            raise SolverError(f"the plan wants input '{name}' of the model {assignment[name]}")
    for use in graph.uses:
        if assignment[use.stored].partial or assignment[use.stored].grad_partial:
            raise SolverError(f"the plan stores '{use.fqn}' as {assignment[use.stored]}")
    for kind, demand, names in graph.marks.demands():
        found = [assignment[n] for n in names]
        if not meets(demand, found):
            raise SolverError(
                f"the plan leaves {[*names]} {found}, but {KINDS[kind].reason.format(names[0])}"
            )
    for name in graph.outputs:
        if assignment[name] != REPLICATED:
            raise SolverError(f"the plan leaves output '{name}' of the model {assignment[name]}")
    for name, allowed in states.handed().items():
        if assignment[name] not in allowed:
            raise SolverError(f"the plan leaves hidden state '{name}' {assignment[name]}")
    if states.sequence:
        _check_sequence(graph, states.sequence, assignment)


def meets(demand: Demand, found: Sequence[State]) -> bool:
    """Whether tensors with a mark of this demand may be in these states."""
    match demand:
        case Demand.REPLICATED:
            return all(s == REPLICATED for s in found)
        case Demand.READABLE:
            return not any(s.shards or s.partial for s in found)
        case Demand.SUMMED:
            return not any(s.partial for s in found)
        case Demand.ONE_STATE:
            return all(s == found[0] for s in found)
        case Demand.NOTHING:
            return True


def distinct(graph: Graph, states: States, assignment: Assignment) -> list[tuple[Op, int]]:
    """Return one op for each set with the same axes and states, with the size of the set.

    Copies of an op in equal blocks share its axes, so what holds for one holds for all.
    """
    found: dict[object, list[Any]] = {}
    state = {name: id(s) for name, s in assignment.items()}.__getitem__
    axes = states.axes.rule_axes
    for op, times in _repeated(graph, state):
        at = axes.get(op.name)
        key = (op.name if at is None else id(at), *map(state, op.inputs), *map(state, op.outputs))
        if key in found:
            found[key][1] += times
        else:
            found[key] = [op, times]
    return [(op, times) for op, times in found.values()]


def _repeated(graph: Graph, state: Callable[[str], int]) -> Iterator[tuple[Op, int]]:
    """Yield (op, count), with one copy of each block whose tensors are in the same states."""
    blocks = grouped(((b.kind, *map(state, b.tensors)), b) for b in graph.blocks)
    done = 0
    for block in graph.blocks:
        yield from ((op, 1) for op in graph.ops[done : block.start])
        done = block.stop
    yield from ((op, 1) for op in graph.ops[done:])
    for copies in blocks.values():
        yield from ((op, len(copies)) for op in graph.ops[copies[0].start : copies[0].stop])


def _check_sequence(graph: Graph, sequence: OpenSequence, assignment: Assignment) -> None:
    """Check that closed dims are not sharded along a sequence, and that norms run sharded."""
    for name, dim in sequence.closed:
        if sequence.splits(s for s in assignment[name].shards if s[0] == dim):
            raise SolverError(f"the plan splits '{name}' along its sequence, dim {dim}")
    for b in graph.boundaries:
        if sequence.misplaced(b, assignment[b.source].shards, assignment[b.target].shards):
            raise SolverError(f"the plan runs norm '{b.module}' on the whole sequence")


def _check_boundaries(
    graph: Graph, states: States, assignment: Assignment, rigid: Collection[str]
) -> None:
    """Check that a module redistributes a slot alike in each call, and a rigid one never."""
    done: dict[Slot, tuple[str, tuple[State, State]]] = {}
    sizes = Sizes(graph, states.axes)
    for boundary in graph.boundaries:
        change = (assignment[boundary.source], assignment[boundary.target])
        rigidly = boundary.module in rigid and boundary.side != KEEPS
        if rigidly and change[0] != change[1]:
            raise SolverError(f"the plan changes {_where(boundary)}, where nothing may change")
        if boundary.side == ATTENDS and not states.attends(boundary.slot, *change):
            raise SolverError(f"the plan changes {_where(boundary)} as attention cannot")
        if boundary.target in graph.marks.overwritten and not states.writable(*change):
            raise SolverError(f"the plan changes {_where(boundary)}, which is changed in place")
        source, before = done.setdefault(graph.slot(boundary), (boundary.source, change))
        if change[0] == change[1] and before[0] == before[1]:
            continue
        if before != change or not sizes.same(source, boundary.source):
            raise SolverError(f"the plan changes {_where(boundary)} otherwise in a later call")


def _where(boundary: Boundary) -> str:
    return f"tensor '{boundary.slot}' {boundary.side} '{boundary.module}'"


def _wrong(op: Op, states: States, assignment: Assignment) -> str | None:
    names = (*op.inputs, *op.outputs)
    have = [assignment[n] for n in names]
    rule = states.axes.rules.get(op.name)
    split: OpShards = frozenset()
    if any(s.shards for s in have):
        if rule is None:
            return "an op without a rule has tensors that are split"
        found = split_axes((*rule.operands, *rule.results), have, states, op)
        if isinstance(found, str):
            return found
        split = found
        moved = {x for x, _, _ in split} & rule.immovable()
        if moved:
            return f"axes {sorted(moved)} may not be split"
    for bit in states.sub.bits:
        why = (
            _wrong_split(op, rule, split, have, states, bit)
            if rule is not None and any(m & bit for _, _, m in split)
            else _wrong_sum(op, rule, have, states, bit)
        )
        if why is not None:
            return f"over {states.sub.text(bit)}, {why}"
    return None


def _wrong_split(
    op: Op, rule: Rule, split: OpShards, have: Sequence[State], states: States, bit: int
) -> str | None:
    """Return what is wrong over a sub-axis that shards some axis of `op`; None if nothing."""
    here = {(x, a) for x, a, m in split if m & bit}
    reduced = {x for x, _ in here} & (rule.sum | rule.lookup)
    for axis in reduced:
        if not covers(states.axes.rule_axes[op.name][axis], [a for x, a in here if x == axis]):
            return (
                f"only a part of axis {axis} is split, and the rest would be summed more than once"
            )
    for i, (name, state) in enumerate(zip((*op.inputs, *op.outputs), have, strict=True)):
        is_result = i >= len(op.inputs)
        shards: Shards = frozenset(s for s in state.shards if s[2] & bit)
        if is_result and reduced and shards:
            return f"result '{name}' is sharded and would be Partial"
        if reduced and (is_result or (not shards and _added(rule, i, reduced))):
            want = Kind.PARTIAL
        else:
            covered = bool(states.covered(name, shards) & bit)
            want = kind_of(bool(shards), covered, False, states.graph.tensors[name].differentiable)
        if (kind := _kind(states, name, state, bit)) != want:
            role = "result" if is_result else "operand"
            return f"{role} '{name}' is {kind} instead of {want}"
    return None


def _kind(states: States, name: str, state: State, bit: int) -> str:
    """Return the kind of a tensor on a sub-axis; "two kinds at once" if its state is invalid."""
    covered, sharded = states.covered(name, state.shards), mask_of(state.shards) & bit
    if bit & ((state.partial & (state.grad_partial | sharded)) | (state.grad_partial & covered)):
        return "two kinds at once"
    return kind_on(state, bit, covered)


def split_axes(
    sides: Sequence[Dims], have: Sequence[State], states: States, op: Op
) -> OpShards | str:
    """Return the split axes of an op from the states of its tensors; a text if two disagree."""
    trees = states.axes.rule_axes[op.name]
    split = {
        (x, a, m)
        for dims, s in zip(sides, have, strict=True)
        for d, a, m in s.shards
        for x in letters(dims[d])
        if any(atom.id == a for atom in atoms_of(trees[x]))
    }
    for dims, state in zip(sides, have, strict=True):
        want = {
            (d, a, m)
            for d, expr in enumerate(dims)
            for x in letters(expr)
            for y, a, m in split
            if x == y
        }
        if want != set(state.shards):
            return f"axes {sorted(want)} are split, in one tensor {sorted(state.shards)}"
    return frozenset(split)


def _added(rule: Rule, operand: int, reduced: set[str]) -> bool:
    """Whether `operand` is added to an operand with a reduced axis."""
    having = {
        j for j, dims in enumerate(rule.operands) if reduced & {x for e in dims for x in letters(e)}
    }
    return any(operand in group and group & having for group in rule.linear)


def _wrong_sum(
    op: Op, rule: Rule | None, have: Sequence[State], states: States, bit: int
) -> str | None:
    """Return what is wrong over a sub-axis that shards nothing of `op`; None if nothing."""
    names = (*op.inputs, *op.outputs)
    kinds = [_kind(states, n, state, bit) for n, state in zip(names, have, strict=True)]
    each = [kind_of(False, False, False, states.graph.tensors[n].differentiable) for n in names]
    if all(kind == Kind.REPLICATE for kind in kinds) or kinds == each:
        return None
    pending = frozenset(i for i, k in enumerate(kinds[: len(op.inputs)]) if k == Kind.PARTIAL)
    if rule is None or pending not in rule.linear:
        return f"Partial are the operands {sorted(pending)}: it is not linear in them together"
    for i, kind in enumerate(kinds):
        want = Kind.PARTIAL if i in pending or i >= len(op.inputs) else each[i]
        if kind != want:
            return f"tensor {i} is {kind} instead of {want}"
    return None
