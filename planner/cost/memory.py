"""Bytes that a rank must hold: weights, training state, KV cache and activations.

`Holdings` has the bytes that add up over tensors. `peak` needs a complete plan: it is the most that
activations take at once, by liveness over the order of the graph.

Both are the least that an eager run takes: Python may hold a tensor longer than its last use, and
neither a kernel's workspace nor the loss (it is not in the trace) is counted. Views share memory,
a view of a part keeps the full tensor alive, and a collective makes a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate

from shardwright.planner.contract.names import numbered
from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.holdings import storages
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.recomputed_memory import most_while_computed_again
from shardwright.planner.graph.views import is_view
from shardwright.planner.strategies.state import State

Assignment = Mapping[str, State]


def memory(
    costs: Costs,
    assignment: Assignment,
    short: tuple[Costs, Assignment] | None = None,
    rank: int | None = None,
) -> Memory:
    """Return the memory of a rank under a plan, item by item.

    Args:
        costs: Prices of the unfolded graph.
        assignment: The plan.
        short: Prices and plan of a graph with at most three copies of a block in a row. A block
            reads only from the block before it, or from parts of the model outside the row, so the
            peak of activations is the same there. It is not used for training: the activations
            that autograd keeps add up over all blocks.
        rank: The rank of tp; by default the one that has least room.
    """
    held = costs.holdings if rank is None else costs.held_by(rank)
    training = [held.training(n, assignment[n]) for n in held.stored]
    at = (costs, assignment) if held.trains or short is None else short
    return Memory(
        parameters=sum(held.sizes.at_rest(n, assignment[n]) for n in held.stored),
        gradients=sum(gradient for gradient, _ in training),
        optimizer=sum(state for _, state in training),
        cache=sum(held.sizes.bytes(n, assignment[n], held.full) for n in held.cached),
        activations=max(peak(*at, run, rank) for run in costs.passes) + gathered(costs, assignment),
    )


def gathered(costs: Costs, assignment: Assignment) -> int:
    """Return the most bytes at one time of what copies of the model share out.

    FSDP2 gathers the parameters of a block while the block before it runs. Those outside of blocks
    stay for the whole pass. In training a block has its full gradients, too.
    """
    held, sizes = costs.holdings, dict[str, list[int]]()
    shared = {u.stored: u.fqn for u in costs.graph.uses if assignment[u.stored].shared}
    for name, fqn in shared.items():
        size, trained = held.sizes.bytes(name, assignment[name]), held.trains and held.stored[name]
        block = next(iter(numbered(fqn.rpartition(".")[0])), "")
        of_block = sizes.setdefault(block, [0, 0])
        of_block[0] += size
        of_block[1] += size * trained
    always, _ = sizes.pop("", (0, 0))
    ahead = sum(sorted((size for size, _ in sizes.values()), reverse=True)[:2])
    return always + ahead + max((gradients for _, gradients in sizes.values()), default=0)


def passed(costs: Costs, assignment: Assignment) -> Iterator[tuple[str, str]]:
    """Yield (source, target) of the redistributions without a collective forward."""
    for edge in costs.redistributions.edges:
        before, source, target = map(assignment.__getitem__, edge)
        traffic = costs.redistributions.inner(edge[1], before, source, target)
        if traffic is None or not traffic.forward:
            yield edge[1:]


def peak(costs: Costs, assignment: Assignment, run: Pass, rank: int | None = None) -> int:
    """Return the most bytes of activations at one time in a pass, on a rank as for `memory`.

    Activations that are saved for the backward pass stay to the end.
    """
    sizes = (costs.holdings if rank is None else costs.held_by(rank)).sizes
    base = storages(costs.graph, passed(costs, assignment))
    made = {
        name: sizes.bytes_at(op, i, assignment[name], run)
        for op in costs.graph.ops
        for i, name in enumerate(op.outputs, len(op.inputs))
        if base[name] == name
    }
    size = cache(lambda name: made.get(name) or sizes.bytes(name, assignment[name], run))
    change = [0] * (len(costs.graph.ops) + 2)
    living = lives(costs, base, run)
    for root, (first, last) in living.items():
        change[first] += size(root)
        change[last + 1] -= size(root)
    for at, op in enumerate(costs.graph.ops):  # numbers of a quantized weight, while it is used
        for i, name in enumerate(op.inputs):
            if costs.graph.tensors[name].bits is not None and not is_view(op.call):
                size_of_numbers = sizes.bytes_at(op, i, assignment[name], run)
                change[at] += size_of_numbers
                change[at + 1] -= size_of_numbers
    again = most_while_computed_again(costs, base, living, size) if run.trains else 0
    return max(again, max(accumulate(change)))


def lives(costs: Costs, base: Mapping[str, str], run: Pass) -> dict[str, tuple[int, int]]:
    """Return for each memory of activations the numbers of the first and last op that it is held.

    Args:
        costs: Prices of the graph.
        base: Tensor -> the tensor whose memory it uses.
        run: The pass. Activations that are saved for its backward pass stay to the end.
    """
    graph, end = costs.graph, len(costs.graph.ops)
    given = costs.holdings.given
    last: dict[str, int] = {}
    born: dict[str, int] = {}
    for at, op in enumerate(graph.ops):
        for name in (*op.inputs, *op.outputs):
            last[base[name]] = at
            born.setdefault(base[name], at)
    stay = [*graph.outputs, *(costs.recomputation.kept if run.trains else ())]
    for root in {base[n] for n in stay}:
        born.setdefault(root, end)
        last[root] = end
    for boundary in graph.boundaries:  # a collective holds its source and its target at once
        if base[boundary.target] == boundary.target and boundary.target in born:
            root = base[boundary.source]
            last[root] = max(last.get(root, 0), born[boundary.target])
            born.setdefault(root, born[boundary.target])
    return {root: (start, last[root]) for root, start in born.items() if root not in given}
