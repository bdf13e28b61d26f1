"""The mesh that is chosen, against every state of every mesh: three mesh dims on two levels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.planner.devices import device
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.prepare import read
from shardwright.planner.problem.builder import ACTIONS, BYTES, TIE
from shardwright.planner.problem.objective import BYTE_PRICES, primary, weighed_time
from shardwright.planner.search.restrictions import Restrictions, formulate
from shardwright.planner.search.solution import predicted
from shardwright.planner.search.traced_model import TracedModel
from shardwright.planner.search.unfolded import unfolded
from shardwright.planner.solvers.problem import CostVector
from tests.marks import long
from tests.planner.test_device import write
from tests.planner.test_mixtures import WIDTH, Experts, Model
from tests.planner.toys import Chain, solutions

HOSTS, PER_HOST = 2, 4
X = torch.zeros(3, 19, WIDTH)


class Toy(nn.Module):
    """A mixture, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.mlp = Model(Experts), Chain(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mixture(x))


class Best(NamedTuple):
    """The best plan of a mesh: its time, and all bytes of a rank."""

    time: int
    memory: int


def every_mesh() -> list[dict[str, int]]:
    """All meshes of eight ranks: experts are spread over all copies, or over those of a host."""
    found = []
    for tp in (8, 4, 2, 1):
        copies, on_a_host = 8 // tp, max(PER_HOST // tp, 1)
        for ep in {1, on_a_host, copies}:
            dims = {"dp": copies // ep, "ep": ep}
            found.append({**{name: n for name, n in dims.items() if n > 1}, "tp": tp})
    return found


def best_of_all(model: TracedModel, mesh: Mapping[str, int], dp: Any, room: int) -> Best | None:
    """Try every state of every tensor; None if all plans hold more than `room` bytes.

    A byte costs the least power of two that is at least T / (M - W) of the best plan at that price:
    the fraction is least there (`planner/problem/optimize.py`).
    """
    task = model.on(mesh, dp, PER_HOST)
    formulation = formulate(task, Restrictions())
    network, small = formulation.network, formulation.small
    assert small is not None
    every = list(solutions(small.problem))
    assert len(every) > 16

    def total(values: tuple[int, ...]) -> Best:
        states = network.assignment(small.expand(values))
        layouts = Layouts(task.graph, formulation.costs.states, states)
        cost = predicted(task, layouts, unfolded(task, layouts, formulation.costs))
        assert cost.memory is not None
        return Best(cost.time_ns, cost.memory.total)

    def at(price: int) -> tuple[tuple[int, ...], CostVector]:
        return min(every, key=lambda one: (primary(one[1], price), one[1][ACTIONS], one[1][TIE]))

    def is_enough(price: int) -> bool:
        costs = at(price)[1]
        left = room - costs[BYTES]
        return left > 0 and left * 2.0**price >= weighed_time(costs)

    price = next(filter(is_enough, BYTE_PRICES), None)
    if price is None:
        assert min(costs[BYTES] for _, costs in every) > room, "a toy that needs a cap"
        return None
    found = total(at(price)[0])
    assert found.memory <= room, "a toy whose activations need a cap"
    return found


def profile(folder: Path, out_of_host: int, memory: int) -> str:
    """Write a device: small, with slow links out of a host, and return its file."""
    data = device.device("l4-pcie").model_dump()
    data["hosts"] = {"devices": PER_HOST, "latency_ns": 20_000, "bytes_per_s": out_of_host}
    data["memory_bytes"] = memory
    return write(folder, data)


@pytest.mark.parametrize(
    ("phase", "seq", "out_of_host", "memory"),
    [
        long("train", 512, 10**8, 10**9),
        ("train", 8, 10**10, 350_000),  # some fit
        long("train", 512, 10**10, 10**4),  # nothing fits
        ("prefill", 512, 10**10, 10**9),
        long("prefill", 512, 10**8, 10**9),
    ],
)
def test_the_chosen_mesh_is_the_best_of_all_states(
    phase: str, seq: int, out_of_host: int, memory: int, tmp_path: Path
) -> None:
    name = profile(tmp_path, out_of_host, memory)
    how: dict[str, Any] = {"args": (X,), "phase": phase, "seq": seq, "device": name}
    model = read(Toy(), 8, **how)
    by_hand = {
        (*mesh.items(), dp): best_of_all(model, mesh, dp, memory)
        for mesh in every_mesh()
        for dp in (["ddp", "fsdp"] if phase == "train" and [*mesh] == ["dp", "tp"] else ["ddp"])
    }
    assert any(len(names) == 4 for names in by_hand)  # three dims and what copies do
    plan = shardwright.plan(Toy(), cluster=shardwright.Cluster(HOSTS, PER_HOST), batch=8, **how)
    assert {(*one.mesh.items(), one.dp) for one in plan.meshes} == by_hand.keys()
    fit = [one for one in by_hand.values() if one is not None]
    for one in plan.meshes:
        best = by_hand[*one.mesh.items(), one.dp]
        assert one.fits == (best is not None)
        assert best is None or (one.time_ns, one.memory) == best
    assert not fit or plan.predicted.time_ns == min(fit).time
