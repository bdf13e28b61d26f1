"""Predicts the cost of a plan per rank: bytes, time, and the collectives of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.mesh import EP, TP, Coords
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.plan_figures import CollectiveCount, Memory, Prediction
from shardwright.planner.contract.transitions import Collective, buckets
from shardwright.planner.devices.device import Device
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Graph
from shardwright.planner.verify.recost import Bill, Calls

FLAG_BYTES = 4
"""Bytes of the flag that says whether a copy of the model has a gradient of a parameter."""


def prediction(
    layouts: Layouts,
    bill: Bill,
    memory: Memory,
    memory_by_rank: Sequence[int],
    ranks: Sequence[Coords],
) -> Prediction:
    """Return the predicted cost of a plan per rank.

    Args:
        layouts: Layouts of the folded graph.
        bill: The bill of the unfolded graph.
        memory: The memory of the rank that has least room.
        memory_by_rank: The bytes of each rank of tp, if they differ.
        ranks: Coordinates of each rank.
    """
    sizes = {held(at): rank_bytes(layouts, at) for at in {held(r): r for r in ranks}.values()}
    first = bill.first_run
    return Prediction(
        parameter_bytes=[sizes[held(at)] for at in ranks],
        unsharded_bytes=rank_bytes(layouts, None),
        memory=memory,
        memory_by_rank=[*memory_by_rank],
        time_ns=first.price.time,
        phase_ns=first.times,
        collectives=count(first),
    )


def held(at: Coords) -> tuple[object, ...]:
    """Return the coordinates that decide which parameters a rank holds."""
    return at[TP], at.get(EP)


def rank_bytes(layouts: Layouts, coords: Coords | None) -> int:
    """Return the bytes of parameters and buffers on the rank at `coords`; None for unsharded."""
    total = 0
    for stored in dict.fromkeys(u.stored for u in layouts.graph.uses):
        n = 1
        for dim in layouts.traced(stored):
            n *= layout.dim_size(dim, coords) or 0
        total += layouts.graph.tensors[stored].stored_bytes(n) * layouts.graph.times(stored)
    return total


def whole_bytes(graph: Graph, name: str) -> int:
    """Return the bytes of a full tensor."""
    return graph.tensors[name].stored_bytes(prod(graph.tensors[name].shape))


def count(bill: Bill) -> list[CollectiveCount]:
    """Count collectives by phase and kind: the first pass, its backward pass, and a decode step."""
    ahead, back = bill.collectives()
    found = {"forward": ahead, "backward": back + averages(bill)}
    for run in bill.costs.passes[1:]:
        if run.phase == "decode":
            found["decode"] = bill.collectives(run)[0]
    return tally(found, bill.costs.redistributions.device)


def averages(bill: Bill) -> Calls:
    """Return the all-reduces in which copies of the model average their gradients, in buckets.

    Before, they say which gradients they have.
    """
    costs, out = bill.costs, Calls()
    sizes = costs.redistributions.averaged(bill.assignment.__getitem__)
    for (_, call), each in sizes.items():
        for bucket in buckets(each):
            out[call._replace(bytes=sum(each[i] for i in bucket))] += 1
    if sizes:
        flags = FLAG_BYTES * sum(map(len, sizes.values()))
        hosts = costs.redistributions.hosts(0)
        out[Collective("all_reduce", flags, costs.workload.replicas, hosts)] += 1
    return out


def tally(found: Mapping[str, Mapping[Collective, int]], device: Device) -> list[CollectiveCount]:
    """Return counts and bytes of collectives by phase, kind, hosts and way, as a plan has them."""
    out = []
    for phase, calls in found.items():
        goes = grouped(((c.kind, c.hosts, device.way(*c)), (c, n)) for c, n in calls.items())
        for (kind, hosts, way), alike in sorted(goes.items()):
            count, size = sum(n for _, n in alike), sum(n * c.bytes for c, n in alike)
            of: Any = {"phase": phase, "kind": kind, "hosts": hosts, "way": way}
            out.append(CollectiveCount(**of, count=count, bytes=size))
    return out
