"""An independent look at a plan: does every op of the whole graph hold, and what does it cost?

It reads the rules and the prices, but not the network, its simplification or any solver: for each
op it works out from the states alone whether the rule allows them together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.axes import atoms_of
from shardwright.planner.cost import Collective, Costs, Crossing
from shardwright.planner.graph import Graph, Op
from shardwright.planner.phases import Pass
from shardwright.planner.plan_file import Phase
from shardwright.planner.sequence import OpenSequence
from shardwright.planner.states import COPIED, GRADIENT, PARTIAL, WHOLE, Mode, State, States, covers
from shardwright.rules.notation import Dims, Rule, letters

Assignment = Mapping[str, State]


def check(
    graph: Graph, states: States, assignment: Assignment, rigid: Collection[str] = ()
) -> None:
    """Check every op, border, use, input and output of the unfolded graph.

    What a change of placement costs, and whether there is a collective for it, is `price`'s part.

    Args:
        graph: The traced model.
        states: Its axes, and which of them are covered.
        assignment: The plan.
        rigid: Modules at whose borders nothing may change.

    Raises:
        SolverError: something does not hold; the message names the op and the place.
    """
    for op, _ in distinct(graph, states, assignment):
        if (why := _wrong(op, states, assignment)) is not None:
            raise SolverError(
                f"the plan does not hold at {op.call.op} in '{op.module}' ({op.source}): {why}; "
                "this is a mistake of the planner: please report it"
            )
    _check_borders(graph, assignment, rigid)
    for name in graph.inputs:
        if assignment[name] != WHOLE:
            raise SolverError(f"the plan wants input '{name}' of the model {assignment[name]}")
    for use in graph.uses:
        if assignment[use.stored].pending:
            raise SolverError(f"the plan stores '{use.fqn}' as {assignment[use.stored]}")
    for name in graph.logits:
        if assignment[name] == PARTIAL:
            raise SolverError(f"the plan leaves the scores '{name}' a pending sum")
    for name in graph.outputs:
        if assignment[name] != WHOLE:
            raise SolverError(f"the plan leaves output '{name}' of the model {assignment[name]}")
    for name, allowed in states.handed().items():
        if assignment[name] not in allowed:
            raise SolverError(f"the plan leaves hidden state '{name}' {assignment[name]}")
    if states.sequence:
        _check_sequence(graph, states.sequence, assignment)


def distinct(graph: Graph, states: States, assignment: Assignment) -> list[tuple[Op, int]]:
    """The ops, each with how many there are with the same axes in the same states.

    Copies of an op in blocks that are alike share its axes: what holds for one holds for all.
    """
    found: dict[object, tuple[Op, int]] = {}
    for op in graph.ops:
        have = tuple(assignment[n] for n in (*op.inputs, *op.outputs))
        axes = states.axes.axes.get(op.name)
        key = (op.name if axes is None else id(axes), have)
        first, times = found.get(key, (op, 0))
        found[key] = first, times + 1
    return list(found.values())


def _check_sequence(graph: Graph, sequence: OpenSequence, assignment: Assignment) -> None:
    """What may not be split along a sequence is not, and norms take it split."""
    for name, dim in sequence.closed:
        if sequence.splits((d, a) for d, a in assignment[name].shards if d == dim):
            raise SolverError(f"the plan splits '{name}' along its sequence, dim {dim}")
    for b in graph.borders:
        if sequence.misplaced(b, assignment[b.source].shards, assignment[b.target].shards):
            raise SolverError(f"the plan runs norm '{b.module}' on the whole sequence")


def _check_borders(graph: Graph, assignment: Assignment, rigid: Collection[str]) -> None:
    """A module does the same to a slot in each of its calls, and a rigid one nothing."""
    done: dict[tuple[str, str, str], tuple[State, State]] = {}
    for border in graph.borders:
        change = (assignment[border.source], assignment[border.target])
        where = f"'{border.slot}' {border.side} '{border.module}'"
        if border.module in rigid and change[0] != change[1]:
            raise SolverError(f"the plan changes tensor {where}, where nothing may change")
        if done.setdefault((border.module, border.side, border.slot), change) != change:
            raise SolverError(f"the plan changes tensor {where} otherwise in a later call")


def _wrong(op: Op, states: States, assignment: Assignment) -> str | None:
    names = (*op.inputs, *op.outputs)
    have = [assignment[n] for n in names]
    differentiable = [states.graph.tensors[n].differentiable for n in names]
    if all(s == WHOLE for s in have):
        return None
    if all(s == (COPIED if d else WHOLE) for s, d in zip(have, differentiable, strict=True)):
        return None
    rule = states.axes.rules.get(op.name)
    if rule is None:
        return "an op without a rule has tensors that are not whole"
    sides = (*rule.operands, *rule.results)
    split = _split_axes(rule, sides, have, states, op)
    if isinstance(split, str):
        return split
    if not split:
        return _wrong_sum(op, rule, have, differentiable)
    moved = {x for x, _ in split}
    if moved & rule.immovable():
        return f"axes {sorted(moved & rule.immovable())} may not be split"
    reduced = moved & (rule.sum | rule.lookup)
    for axis in reduced:
        if not covers(states.axes.axes[op.name][axis], [a for x, a in split if x == axis]):
            return (
                f"only a part of axis {axis} is split, and the rest would be summed more than once"
            )
    for i, (name, state, can) in enumerate(zip(names, have, differentiable, strict=True)):
        is_result = i >= len(op.inputs)
        if (
            reduced
            and is_result
            or reduced
            and not state.shards
            and _added(rule, i, moved & reduced)
        ):
            want = PARTIAL
        else:
            pending = can and not (state.shards and states.covered(name, state.shards))
            want = State(state.shards, GRADIENT if pending else "")
        if state != want:
            return f"{'result' if is_result else 'operand'} '{name}' is {state} instead of {want}"
    return None


def _split_axes(
    rule: Rule, sides: Sequence[Dims], have: Sequence[State], states: States, op: Op
) -> set[tuple[str, int]] | str:
    """The split axes that the states show; a text where two tensors disagree."""
    trees = {x: {a.id for a in atoms_of(d)} for x, d in states.axes.axes[op.name].items()}
    split = {
        (x, a)
        for dims, s in zip(sides, have, strict=True)
        for d, a in s.shards
        for x in letters(dims[d])
        if a in trees[x]
    }
    for dims, state in zip(sides, have, strict=True):
        want = {
            (d, a) for d, expr in enumerate(dims) for x in letters(expr) for y, a in split if x == y
        }
        if want != set(state.shards):
            return f"axes {sorted(want)} are split, in one tensor {sorted(state.shards)}"
    return split


def _added(rule: Rule, operand: int, reduced: set[str]) -> bool:
    """Whether `operand` is added to one that has a reduced axis."""
    having = {
        j for j, dims in enumerate(rule.operands) if reduced & {x for e in dims for x in letters(e)}
    }
    return any(operand in group and group & having for group in rule.linear)


def _wrong_sum(
    op: Op, rule: Rule, have: Sequence[State], differentiable: Sequence[bool]
) -> str | None:
    pending = frozenset(i for i, s in enumerate(have[: len(op.inputs)]) if s == PARTIAL)
    if pending not in rule.linear:
        return f"sums are pending in operands {sorted(pending)}: it is not linear in them together"
    for i, state in enumerate(have):
        want = (
            PARTIAL
            if i in pending or i >= len(op.inputs)
            else COPIED
            if differentiable[i]
            else WHOLE
        )
        if state != want:
            return f"tensor {i} is {state} instead of {want}"
    return None


class Price(NamedTuple):
    """Bytes stored, nanoseconds of all passes and of a backward pass where none is asked for."""

    bytes: int
    time: int
    backward: int


def price(graph: Graph, costs: Costs, assignment: Assignment) -> Price:
    """What the whole graph costs, added up from its parts.

    Raises:
        SolverError: a change of placement that the runtime cannot make.
    """
    stored = dict.fromkeys(u.stored for u in graph.uses)
    size = sum(costs.bytes(n, assignment[n]) for n in stored)
    once = times(graph, costs, assignment)
    time = sum(run.times * once[run.phase] for run in costs.passes)
    if any(run.trains for run in costs.passes):
        return Price(size, time, 0)
    back = collectives(graph, costs, assignment)[1]
    return Price(size, time, sum(costs.nanoseconds((c,)) for c in back))


def times(graph: Graph, costs: Costs, assignment: Assignment) -> dict[Phase, int]:
    """Nanoseconds of each phase of the workload, run once.

    Raises:
        SolverError: a change of placement that the runtime cannot make.
    """
    ops = distinct(graph, costs.states, assignment)
    modes = [(op, _mode(op, costs, assignment), times) for op, times in ops]
    out: dict[Phase, int] = {}
    for run in costs.passes:
        ahead, back = collectives(graph, costs, assignment, run)
        spent = sum(n * costs.compute_once(op, mode, run) for op, mode, n in modes)
        taken = (*ahead, *back) if run.trains else ahead
        out[run.phase] = spent + sum(costs.nanoseconds((c,)) for c in taken)
    return out


def _mode(op: Op, costs: Costs, assignment: Assignment) -> Mode:
    have = tuple(assignment[n] for n in (*op.inputs, *op.outputs))
    rule = costs.axes.rules.get(op.name)
    split = (
        set()
        if rule is None
        else _split_axes(rule, (*rule.operands, *rule.results), have, costs.states, op)
    )
    return Mode(have, frozenset(() if isinstance(split, str) else split))


def collectives(
    graph: Graph, costs: Costs, assignment: Assignment, run: Pass | None = None
) -> tuple[list[Collective], list[Collective]]:
    """Every collective of a forward and of a backward pass, by default the workload's first."""
    forward: list[Collective] = []
    backward: list[Collective] = []
    outer = graph.outer()
    edges = [(u.stored, u.stored, u.used) for u in graph.uses]
    stored = {u.stored for u in graph.uses}  # weights stay where they are
    for border in graph.borders:
        around = outer.get(border.target)
        before = around.source if around else border.source
        edges.append((before, border.source, border.target))
    known: dict[object, Crossing | None] = {}
    for before, source, target in edges:
        states = (assignment[before], assignment[source], assignment[target])
        key = (id(costs.axes.dims[source]), graph.tensors[source].dtype, source in stored, states)
        if key not in known:
            known[key] = costs.inner_crossing(source, *states, run)[0]
        crossing = known[key]
        if crossing is None or (source in stored and crossing.forward):
            raise SolverError(
                f"the plan takes '{source}' from {assignment[source]} to {assignment[target]}, "
                "which no collective does"
            )
        forward += crossing.forward
        backward += crossing.backward
    return forward, backward
