"""The costs of a plan for its first run alone."""

from __future__ import annotations

from shardwright.planner.cost.cost import Costs
from shardwright.planner.strategies.states import States
from shardwright.planner.verify.recost import Bill


def of_first_run(bill: Bill) -> Bill:
    """Return the bill of the first run alone. With one run, this is the given bill.

    A parameter that the first run does not read is held as it is stored, and has no gradient.
    """
    before, whole = bill.costs, bill.costs.graph
    graph = whole.first_run()
    if graph is whole:
        return bill
    states = States(
        graph,
        before.axes,
        before.states.ranks,
        before.states.replaceable,
        sequence=before.states.sequence,
        sub=before.states.sub,
    )
    keys = before.sizes.keys.within(graph)
    costs = Costs(graph, before.axes, states, before.workload, before.caches, before.gathered, keys)
    read = {n for op in graph.ops for n in op.inputs} | {b.source for b in graph.boundaries}
    idle = {u.used: bill.assignment[u.stored] for u in graph.uses if u.used not in read}
    return Bill(costs, {n: bill.assignment[n] for n in graph.tensors} | idle)
