"""What a rank must hold, in bytes: weights, training state, KV cache and activations.

`Holdings` is what adds up over tensors; `peak` is the rest, which only a whole plan shows: the most
that tensors between ops take at once, by liveness over the order of the graph.

Both are the least that an eager run takes: Python may hold a tensor longer than its last use, and
neither a kernel's workspace nor the loss (it is not in the trace) is counted. Views share memory,
parts of one tensor hold all of it, and a collective makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.planner.contract.plan_file import Memory
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.holdings import memories
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.saved_for_backward import Kept
from shardwright.planner.strategies.states import State

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
    size = {n: costs.sizes.bytes(n, assignment[n], held.full) for n in held.names}
    at = (costs, assignment) if held.trains or short is None else short
    return Memory(
        parameters=sum(size[n] for n in held.stored),
        gradients=sum(gradient for gradient, _ in training),
        optimizer=sum(state for _, state in training),
        cache=sum(size[n] for n in held.cached),
        activations=max(peak(*at, run) for run in costs.passes),
    )


def passed(costs: Costs, assignment: Assignment) -> Iterator[tuple[str, str]]:
    """(source, target) of the changes of placement for which no collective is made."""
    for edge in costs.redistributions.edges:
        before, source, target = (assignment[n] for n in edge)
        traffic, _ = costs.redistributions.inner(edge[1], before, source, target)
        if traffic is None or not traffic.forward:
            yield edge[1:]


def peak(costs: Costs, assignment: Assignment, run: Pass) -> int:
    """Most bytes of activations at one time in a pass; those kept for its backward pass stay."""
    graph = costs.graph
    base = memories(graph, passed(costs, assignment))
    apart = {*costs.holdings.stored, *graph.inputs}
    last: dict[str, int] = {}
    born: dict[str, int] = {}
    for at, op in enumerate(graph.ops):
        for name in (*op.inputs, *op.outputs):
            last[base[name]] = at
            born.setdefault(base[name], at)
    size: dict[str, int] = {}
    for op in graph.ops:
        for i, name in enumerate(op.outputs, len(op.inputs)):
            if base[name] == name:
                size[name] = costs.sizes.bytes_at(op, i, assignment[name], run)
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
        n = size.get(root) or costs.sizes.bytes(root, assignment[root], run)
        change[start] += n
        change[last[root] + 1] -= n
    most = now = 0
    for step in change:
        now += step
        most = max(most, now)
    return most
