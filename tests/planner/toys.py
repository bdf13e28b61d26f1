"""Small graphs, each made for one thing that the solver must get right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.cost import Costs
from shardwright.planner.graph.axes import refine
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.builder import CostFunctionNetwork, build_network
from shardwright.planner.search.task import replaceable
from shardwright.planner.solvers.presolve import Presolved, presolve
from shardwright.planner.solvers.problem import CostVector, Factor, Problem
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States
from tests.planning import trace

D, H, WORDS = 64, 128, 101


class Chain(nn.Module):
    """Three linear layers in a row."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=False) for a, b in pairs])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ColumnRow(nn.Module):
    """What everyone splits by columns, then by rows."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.relu, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, H, bias=bias), nn.Linear(H, D, bias=bias)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Residual(nn.Module):
    """A block with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), ColumnRow()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class FusedGate(nn.Module):
    """One projection, two parts that meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Parallel(nn.Module):
    """Two branches of one input, added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = ColumnRow(bias=False), ColumnRow(torch.tanh, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Twice(nn.Module):
    """A module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = ColumnRow()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(x))


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.words(i))


class Unequal(nn.Module):
    """A concatenation of parts of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 48, bias=False), nn.Linear(D, 80, bias=False)
        self.o = nn.Linear(128, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat((F.relu(self.a(x)), self.b(x)), -1))


class Heads(nn.Module):
    """Query heads in groups that share a key head, of which there are fewer than ranks."""

    def __init__(self, keys: int = 2, group: int = 4, width: int = 8) -> None:
        super().__init__()
        self.keys, self.group, self.width = keys, group, width
        self.q = nn.Linear(D, keys * group * width, bias=False)
        self.k = nn.Parameter(torch.zeros(keys, 1, width))
        self.o = nn.Linear(keys * group * width, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.keys, self.group, self.width)
        return self.o((q * self.k).softmax(-1).flatten(2))


class Within(nn.Module):
    """A root around a module: at its own boundary nothing may change."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


TOYS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: Chain(D, H, D, 96),
    "column, row": ColumnRow,
    "residual": Residual,
    "fused": FusedGate,
    "conflict": lambda: ColumnRow(lambda y: y.softmax(-1)),
    "parallel": Parallel,
    "twice": Twice,
    "tied": Tied,
    "unequal": Unequal,
    "heads": Heads,
    "uneven heads": lambda: Heads(6, 1),
}
RANKS = {"heads": 4, "uneven heads": 4}
"""Ranks of the toys that are not for 2."""
WORKLOAD = Workload(batch=1, seq=512, dtype="float32", device="h100-nvlink")


@dataclass(frozen=True)
class Toy:
    """A traced module and the problem of splitting it."""

    graph: Graph
    states: States
    costs: Costs
    network: CostFunctionNetwork
    small: Presolved

    def assignment(self, values: tuple[int, ...]) -> dict[str, State]:
        """Tensor name -> state, of values of the small problem."""
        return self.network.assignment(self.small.expand(values))


@cache
def toy(name: str) -> Toy:
    """The toy of that name."""
    ranks = RANKS.get(name, 2)
    with torch.device("meta"):
        module = Within(TOYS[name]())
    shape = (3, 19) if name == "tied" else (3, 19, D)
    x = torch.zeros(shape, dtype=torch.int64 if name == "tied" else torch.float32, device="meta")
    graph = trace(module, (x,), {})
    axes = refine(graph)
    states = States(graph, axes, ranks, replaceable(graph, module))
    costs = Costs(graph, axes, states, WORKLOAD)
    network = build_network(graph, states, costs, frozenset({""}))
    small = presolve(network.problem)
    assert small is not None
    return Toy(graph, states, costs, network, small)


def solutions(problem: Problem) -> Iterator[tuple[tuple[int, ...], CostVector]]:
    """Every assignment that all factors allow, with its costs: tried one by one, nothing clever."""
    last: dict[int, list[Factor]] = {}
    for factor in problem.factors:
        last.setdefault(max(factor.scope, default=-1), []).append(factor)
    tables = {id(f): {r.values: r.costs for r in f.rows} for f in problem.factors}
    zero = (0,) * len(problem.components)

    def extend(
        chosen: tuple[int, ...], costs: CostVector
    ) -> Iterator[tuple[tuple[int, ...], CostVector]]:
        for factor in last.get(len(chosen) - 1, ()):
            row = tables[id(factor)].get(tuple(chosen[v] for v in factor.scope))
            if row is None:
                return
            costs = tuple(a + b for a, b in zip(costs, row, strict=True))
        if len(chosen) == len(problem.domains):
            yield chosen, costs
            return
        for value in problem.domains[len(chosen)]:
            yield from extend((*chosen, value), costs)

    yield from extend((), zero)
