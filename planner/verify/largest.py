"""Names the largest parameters on a rank, for the message that no plan fits a budget."""

from __future__ import annotations

from shardwright.planner.contract.names import pattern
from shardwright.planner.cost.cost import Costs
from shardwright.planner.graph.graph import Graph
from shardwright.planner.units import human_bytes
from shardwright.planner.verify.check import Assignment

NAMED = 3


def largest(graph: Graph, costs: Costs, assignment: Assignment) -> str:
    """Return the parameters with most bytes on a rank in words, summed over equal layers."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    seen: set[str] = set()
    for use in graph.uses:
        if use.stored in seen:
            continue
        seen.add(use.stored)
        name, state = pattern(use.fqn), assignment[use.stored]
        size = graph.times(use.stored) * costs.sizes.bytes(use.stored, state)
        sizes[name] = sizes.get(name, 0) + size
        if not state.shards:
            whole.add(name)
    ordered = sorted(sizes, key=lambda name: (-sizes[name], name))[:NAMED]
    words = [
        f"{name} {human_bytes(sizes[name])} ({'whole' if name in whole else 'split'})"
        for name in ordered
    ]
    return ", ".join(words)
