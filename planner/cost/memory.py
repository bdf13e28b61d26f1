"""What a rank must hold, in bytes: weights, training state, KV cache and activations.

`Holdings` is what adds up over tensors, so the solver can weigh it: parameters and buffers; where
the workload trains, their gradients, the optimizer's state, and the activations that autograd keeps
(without checkpointing); where it generates, the KV cache. `peak` is the rest, which only a whole
plan shows: the most that tensors between ops take at once, by liveness over the order of the graph.

Both are the least that an eager run takes: Python may hold a tensor longer than its last use, and
neither a kernel's workspace nor the loss (it is not in the trace) is counted. Views share memory,
parts of one tensor hold all of it, and a collective makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardwright.planner.contract.plan_file import Memory
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.saved_for_backward import Kept
from shardwright.planner.graph.views import is_view
from shardwright.planner.strategies.states import State

if TYPE_CHECKING:
    from shardwright.planner.cost.cost import Costs

Assignment = Mapping[str, State]


@dataclass(frozen=True)
class Holdings:
    """What is held of each tensor whatever the others are."""

    costs: Costs

    @cached_property
    def full(self) -> Pass:
        """A pass over all tokens, whatever the phase."""
        load = self.costs.workload
        return Pass("prefill", 1, load.batch, load.seq, load.seq)

    @cached_property
    def trains(self) -> bool:
        """Whether there are gradients."""
        return any(run.trains for run in self.costs.passes)

    @cached_property
    def stored(self) -> dict[str, bool]:
        """Parameters and buffers: whether they are trained."""
        graph = self.costs.graph
        return {u.stored: graph.tensors[u.stored].differentiable for u in graph.uses}

    @cached_property
    def cached(self) -> frozenset[str]:
        """Keys and values."""
        generates = not all(run.trains for run in self.costs.passes)
        return frozenset(self.costs.keys.cached if generates and self.costs.caches else ())

    @cached_property
    def kept(self) -> frozenset[str]:
        """Activations that autograd keeps."""
        if not self.trains:
            return frozenset()
        graph = self.costs.graph
        base = memories(self.costs, None)
        other = {*self.stored, *graph.inputs}
        return frozenset(base[n] for n in Kept(graph.priced_runs()).names()) - other

    @cached_property
    def names(self) -> list[str]:
        """Tensors of which something is held, in a fixed order."""
        return [n for n in self.costs.graph.tensors if n in self.stored or n in self.others]

    @cached_property
    def others(self) -> frozenset[str]:
        """Those that are no parameters."""
        return self.cached | self.kept

    def bytes(self, name: str, state: State) -> int:
        """Bytes held of tensor `name` in `state`, on the rank that holds most."""
        size = self.costs.bytes(name, state, self.full)
        if name not in self.stored:
            return size * ((name in self.cached) + (name in self.kept))
        return size + sum(self.training(name, state))

    def training(self, name: str, state: State) -> tuple[int, int]:
        """Bytes of the gradient and of the optimizer's state of a parameter."""
        if not (self.trains and self.stored[name]):
            return 0, 0
        size = self.costs.bytes(name, state, self.full)
        elements = size // self.costs.graph.tensors[name].dtype.itemsize
        return size, elements * self.costs.workload.optimizer_bytes


def memory(
    costs: Costs, assignment: Assignment, short: tuple[Costs, Assignment] | None = None
) -> Memory:
    """What the fullest rank holds with a plan, item by item.

    Args:
        costs: Of the whole graph.
        assignment: The plan.
        short: The same for a graph with three copies of a block for any larger number in a row.
            A block takes what others made from the one before it, or from one that is alone of its
            kind: so what is alive between ops is at its most there as in the whole. But what
            autograd keeps adds up, and takes the whole.
    """
    held = costs.holdings
    training = [held.training(n, assignment[n]) for n in held.stored]
    size = {n: costs.bytes(n, assignment[n], held.full) for n in held.names}
    at = (costs, assignment) if held.trains or short is None else short
    return Memory(
        parameters=sum(size[n] for n in held.stored),
        gradients=sum(gradient for gradient, _ in training),
        optimizer=sum(state for _, state in training),
        cache=sum(size[n] for n in held.cached),
        activations=max(peak(*at, run) for run in costs.passes),
    )


def memories(costs: Costs, assignment: Assignment | None) -> dict[str, str]:
    """Tensor -> the one whose memory it is in; itself, if an op or a collective made it new.

    Without an assignment, as if there were no collectives.
    """
    graph, source = costs.graph, dict[str, str]()
    made: dict[object, bool] = {}
    for before, start, end in costs.edges:
        if assignment is not None and _made_new(costs, assignment, (before, start, end), made):
            continue
        source[end] = start
    calls = {id(op.call): op.call for op in graph.ops}  # copies of an op share theirs
    views = {at for at, call in calls.items() if is_view(call)}
    source |= {out: op.inputs[0] for op in graph.ops if id(op.call) in views for out in op.outputs}
    base: dict[str, str] = {}
    for name in graph.tensors:
        chain = [name]
        while (at := source.get(chain[-1])) is not None and at not in base:
            chain.append(at)
        root = chain[-1] if at is None else base[at]
        for each in chain:
            base[each] = root
    return base


def _made_new(
    costs: Costs, assignment: Assignment, edge: tuple[str, str, str], known: dict[object, bool]
) -> bool:
    """Whether a collective takes a tensor from one state to another; edges that are alike once."""
    before, source, target = (assignment[n] for n in edge)
    key = (id(costs.axes.dims[edge[1]]), id(before), id(source), id(target))
    if key not in known:
        crossing, _ = costs.inner_crossing(edge[1], before, source, target)
        known[key] = crossing is not None and bool(crossing.forward)
    return known[key]


def peak(costs: Costs, assignment: Assignment, run: Pass) -> int:
    """Most bytes of activations at one time in a pass; those kept for its backward pass stay."""
    graph, base = costs.graph, memories(costs, assignment)
    apart = {*costs.holdings.stored, *graph.inputs}
    last: dict[str, int] = {}
    born: dict[str, int] = {}
    for at, op in enumerate(graph.ops):
        for name in (*op.inputs, *op.outputs):
            last[base[name]] = at
            born.setdefault(base[name], at)
    size: dict[str, int] = {}
    known: dict[object, int] = {}  # bytes of results, those of ops that are alike once
    for op in graph.ops:
        for i, name in enumerate(op.outputs, len(op.inputs)):
            if base[name] == name:
                key = (id(costs.axes.axes.get(op.name, name)), i, id(assignment[name]))
                if key not in known:
                    known[key] = costs.bytes_at(op, i, assignment[name], run)
                size[name] = known[key]
    for root in apart:
        born.pop(root, None)
    end = len(graph.ops)
    stay = [*graph.outputs, *(Kept(graph).names() if run.trains else ())]
    for root in {base[n] for n in stay} - apart:
        born.setdefault(root, end)
        last[root] = end
    for boundary in graph.boundaries:  # a collective has both at once
        if base[boundary.target] == boundary.target and boundary.target in born:
            root = base[boundary.source]
            last[root] = max(last.get(root, 0), born[boundary.target])
            if root not in apart:
                born.setdefault(root, born[boundary.target])
    change = [0] * (end + 2)
    for root, start in born.items():
        n = size.get(root) or costs.bytes(root, assignment[root], run)
        change[start] += n
        change[last[root] + 1] -= n
    most = now = 0
    for step in change:
        now += step
        most = max(most, now)
    return most
