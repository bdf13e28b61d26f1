"""What a rank must hold, in bytes: weights, training state, KV cache and activations.

`Holdings` is what adds up over tensors; `peak` is the rest, which only a whole plan shows: the most
that tensors between ops take at once, by liveness over the order of the graph.

Both are the least that an eager run takes: Python may hold a tensor longer than its last use, and
neither a kernel's workspace nor the loss (it is not in the trace) is counted. Views share memory,
parts of one tensor hold all of it, and a collective makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.holdings import storages
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.saved_for_backward import SavedForBackward
from shardwright.planner.strategies.state import State

Assignment = Mapping[str, State]


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
    at = (costs, assignment) if held.trains or short is None else short
    return Memory(
        parameters=sum(costs.sizes.at_rest(n, assignment[n]) for n in held.stored),
        gradients=sum(gradient for gradient, _ in training),
        optimizer=sum(state for _, state in training),
        cache=sum(costs.sizes.bytes(n, assignment[n], held.full) for n in held.cached),
        activations=max(peak(*at, run) for run in costs.passes),
    )


def passed(costs: Costs, assignment: Assignment) -> Iterator[tuple[str, str]]:
    """(source, target) of the changes of placement for which no collective is made."""
    inner = costs.redistributions.inner
    for before, source, target in costs.redistributions.edges:
        traffic, _ = inner(source, assignment[before], assignment[source], assignment[target])
        if traffic is None or not traffic.forward:
            yield source, target


def peak(costs: Costs, assignment: Assignment, run: Pass) -> int:
    """Most bytes of activations at one time in a pass; those kept for its backward pass stay."""
    base = storages(costs.graph, passed(costs, assignment))
    size = {
        name: costs.sizes.bytes_at(op, i, assignment[name], run)
        for op in costs.graph.ops
        for i, name in enumerate(op.outputs, len(op.inputs))
        if base[name] == name
    }
    change = [0] * (len(costs.graph.ops) + 2)
    for root, (first, last) in lives(costs, base, run).items():
        n = size.get(root) or costs.sizes.bytes(root, assignment[root], run)
        change[first] += n
        change[last + 1] -= n
    return max(accumulate(change, initial=0))


def lives(costs: Costs, base: Mapping[str, str], run: Pass) -> dict[str, tuple[int, int]]:
    """Memory of activations -> the numbers of the first and of the last op during which it is held.

    Args:
        costs: Of the graph.
        base: Tensor -> the one whose memory it is in.
        run: The pass; what is kept for its backward pass stays to the end.
    """
    graph, end = costs.graph, len(costs.graph.ops)
    apart = {*costs.holdings.stored, *graph.inputs}
    last: dict[str, int] = {}
    born: dict[str, int] = {}
    for at, op in enumerate(graph.ops):
        for name in (*op.inputs, *op.outputs):
            last[base[name]] = at
            born.setdefault(base[name], at)
    stay = [*graph.outputs, *(SavedForBackward(graph).names() if run.trains else ())]
    for root in {base[n] for n in stay}:
        born.setdefault(root, end)
        last[root] = end
    for boundary in graph.boundaries:  # a collective has both at once
        if base[boundary.target] == boundary.target and boundary.target in born:
            root = base[boundary.source]
            last[root] = max(last.get(root, 0), born[boundary.target])
            born.setdefault(root, born[boundary.target])
    return {root: (start, last[root]) for root, start in born.items() if root not in apart}
