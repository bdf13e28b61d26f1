"""What a rank copies at a change of placement: priced as the runtime does it, counted op by op."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.cost import Costs
from shardwright.planner.graph.axes import refine
from shardwright.planner.strategies.state import REPLICATED, State
from shardwright.planner.strategies.states import States
from shardwright.runtime.communication import collectives
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.redistribution.reshard import Reshard
from tests.planning import trace

WIDTH, RANKS = 32, 2


class Gated(nn.Module):
    """Its hidden tensor is two parts one after the other, each of which is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH // 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(a * b)


class Plain(nn.Module):
    """Its hidden tensor is split as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


MODULES = {"plain": (Plain, f"{WIDTH}@tp"), "gated": (Gated, f"{WIDTH // 2}@tp + {WIDTH // 2}@tp")}


@cache
def costs(kind: str, batch: int, seq: int) -> Costs:
    with torch.device("meta"):
        graph = trace(MODULES[kind][0](), (torch.zeros(3, 19, 8),), {})
    axes = refine(graph)
    load = Workload(batch=batch, seq=seq, dtype="float32", device="cpu-gloo", phases={"train": 1})
    return Costs(graph, axes, States(graph, axes, RANKS), load)


class Copied(TorchDispatchMode):
    """Counts the bytes that ops read and write which make new memory of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("zeros_like", "new_zeros"):
            self.bytes += out.nbytes
        elif name in ("clone", "cat", "stack"):
            self.bytes += 2 * out.nbytes
        elif not func.is_view and name not in ("_unsafe_view", "new_ones"):
            raise AssertionError(f"{name} is not counted")
        return out


def run(_: Group, kind: str, x: Tensor, *__: Any, rows: int = 1) -> Tensor:
    """In the place of a collective: what it gives has the right size, and an all-reduce copies."""
    if kind == "all_reduce":
        return x.clone()
    n = x.numel()
    if kind == "all_gather":
        return collectives.in_rows(x.new_ones(n * RANKS), RANKS, rows)
    return x.new_ones(n // RANKS)


def counted(source: str, target: str, shape: list[int]) -> tuple[int, int]:
    """Bytes that the last rank copies forward and backward, by the runtime."""
    group = Group(RANKS - 1, RANKS, type("Fake", (), {"group_name": "fake"})())  # type: ignore[arg-type]
    mesh, out = Mesh({"tp": group}), []
    before, after = (parse(f"?, ?, {text}") for text in (source, target))
    (step,) = Reshard(before, after, mesh).steps
    for op, placement in ((step.forward, before), (step.backward, after)):
        x = torch.ones(*shape, placement.local_shape(mesh.coords)[-1] or 0)
        with Copied() as copied:
            step.run(op, x, None)
        out.append(copied.bytes)
    return out[0], out[1]


@pytest.mark.parametrize("shape", [[2, 5], [1, 1], [1, 5]], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_copies_are_priced_as_the_runtime_makes_them(
    kind: str, shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_run", run)
    priced = costs(kind, *shape)
    (name,) = (o.outputs[0] for o in priced.graph.ops if o.module == "up" and o.call.op == "linear")
    full = priced.states.sub.full
    (shards,) = (s for s in priced.states.splits(name) if priced.states.covered(name, s))
    states = {
        f"{WIDTH}": REPLICATED,
        f"{WIDTH} | partial tp": State(partial=full),
        f"{WIDTH} | grad-partial tp": State(grad_partial=full),
        MODULES[kind][1]: State(shards),
    }
    seen = 0
    for source, a in states.items():
        for target, b in states.items():
            traffic = priced.redistributions.traffic(name, a, b) if a != b else None
            if traffic is not None:
                seen += 1
                said = (traffic.copied, traffic.copied_back)
                assert said == counted(source, target, shape), (source, target)
    assert seen == 11
