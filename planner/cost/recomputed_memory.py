"""Bytes of activations while a block is computed again for the backward pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate

from shardwright.planner.contract.names import grouped
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.holdings import storages
from shardwright.planner.cost.redistribution_costs import edges
from shardwright.planner.strategies.state import State


def most_while_computed_again(
    costs: Costs,
    base: Mapping[str, str],
    living: Mapping[str, tuple[int, int]],
    size: Callable[[str], int],
) -> int:
    """Return the most bytes of activations while a block is computed again for the backward pass.

    These are what it keeps meanwhile, the outputs of the model, and what autograd keeps of all that
    ran up to the block. What ran after it has had its backward pass.

    Args:
        costs: Prices of the unfolded graph.
        base: Tensor -> the tensor whose memory it uses.
        living: What `memory.lives` returns.
        size: Returns the bytes of a tensor that has memory of its own.
    """
    given, blocks = costs.holdings.given, costs.recomputation
    outputs = {base[name] for name in costs.graph.outputs} - given
    kept = {base[name] for name in blocks.kept} - given - outputs
    stay = sorted((living[root][0], size(root)) for root in kept)
    sums = [*accumulate((n for _, n in stay), initial=sum(map(size, outputs)))]
    until = (sums[bisect_left(stay, (blocks.ends[block] + 1,))] for block in blocks.inner)
    inner = ({base[name] for name in names} - given for names in blocks.inner.values())
    return max((n + sum(map(size, own)) for n, own in zip(until, inner, strict=True)), default=0)


def least_while_computed_again(costs: Costs, states: Mapping[str, Sequence[State]]) -> int:
    """Return the fewest bytes of activations in a backward pass beside all that autograd keeps.

    A block that is computed again keeps its own meanwhile, and what runs after it is freed. What is
    redistributed may share the memory of what it is made from, so the smaller one counts.

    Args:
        costs: Prices of the folded graph.
        states: Tensor -> the states that it may have.
    """
    held, graph, blocks = costs.holdings, costs.graph, costs.recomputation
    if not (held.trains and blocks.inner):
        return 0
    base = storages(graph, ())
    source = {end: base[start] for _, start, end in edges(graph)}
    size = cache(lambda name: min(held.sizes.bytes(name, s, held.full) for s in states[name]))

    def least(name: str) -> tuple[str, int]:
        """Return the first tensor whose memory this one may use, and the fewest bytes of any."""
        chain = [base[name]]
        while chain[-1] in source:
            chain.append(source[chain[-1]])
        return chain[-1], min(map(size, chain))

    made = {name: at for at, op in enumerate(graph.ops) for name in op.outputs}
    most = cache(lambda name: max(held.sizes.bytes(name, s, held.full) for s in states[name]))
    found = [0]
    for block, names in blocks.inner.items():
        memories = grouped(map(least, names))
        kept = sum(min(each) for root, each in memories.items() if root not in held.given)
        own = [
            n for n in held.kept if n in made and blocks.block(graph.ops[made[n]].module) == block
        ]
        later = [n for n in held.kept if made.get(n, 0) > blocks.ends[block]]
        freed = sum(map(most, own)) + sum(max(held.bytes(n, s) for s in states[n]) for n in later)
        found.append(kept - freed)  # in the last copy of the block
    return max(found)
