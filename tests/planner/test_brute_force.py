"""Toy graphs: both solvers find what trying every assignment finds, to the last unit."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import InfeasibleError
from shardwright.planner.axes import refine
from shardwright.planner.check import check, price
from shardwright.planner.cost import Costs
from shardwright.planner.network import BACKWARD, BYTES, TIME, Network, build_network
from shardwright.planner.optimize import optimize, weighed, with_ties
from shardwright.planner.plan_file import Workload
from shardwright.planner.problem import Problem, Solver
from shardwright.planner.search import possible, replaceable
from shardwright.planner.simplify import Simplified, simplify
from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.states import States
from shardwright.planner.trace import trace

SOLVERS: dict[str, Solver] = {"cpsat": cpsat.solve, "backtracking": backtracking.solve}
MOST = 400_000
"""Assignments that are worth trying one by one."""


class Chain(nn.Module):
    """Two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x)))


class Biased(nn.Module):
    """The same with biases: the second is added once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(x)))


class Residual(nn.Module):
    """A norm and a pair of products beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.a = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.b = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.relu(self.a(self.n(x))))


class Fused(nn.Module):
    """One product makes gate and up, which are split again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Conflict(nn.Module):
    """A softmax over the axis that the products would split: something has to be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.softmax(self.a(x), dim=-1))


TOYS = [Chain, Biased, Residual, Fused, Conflict]


def network_of(module: nn.Module, ranks: int = 2) -> tuple[Network, Simplified, Costs]:
    """The network of a toy, and the same simplified."""
    module = module.to("meta").eval()
    graph = trace(module, (torch.zeros(3, 19, 8, device="meta"),), {})
    axes = refine(graph)
    states = States(graph, axes, ranks, replaceable(graph, module))
    workload = Workload(batch=1, seq=64, dtype="float32", device="h100-nvlink")
    costs = Costs(graph, axes, states, workload)
    network = build_network(graph, states, costs, frozenset({""}))
    small = simplify(network.problem)
    assert small is not None
    return network, small, costs


def try_all(problem: Problem) -> int:
    """The least first component of any assignment."""
    sizes = [len(d) for d in problem.domains]
    assert prod(sizes) <= MOST, f"{prod(sizes)} assignments are too many to try"
    found = (problem.price(values) for values in product(*map(range, sizes)))
    return min(costs[0] for costs in found if costs is not None)


@pytest.mark.parametrize("toy", TOYS)
def test_solvers_find_the_least(toy: type[nn.Module]) -> None:
    """Least bytes, and the objective that is minimised in the end."""
    network, small, costs = network_of(toy())
    bytes_only = weighed(small.problem, [lambda c: c[BYTES]])
    least = try_all(bytes_only)
    found = {}
    for name, solve in SOLVERS.items():
        assert solve(bytes_only, 0, {}, None, 60.0).bound == least
        optimum = found[name] = optimize(small, solve, 60.0)
        final = weighed(small.problem, [with_ties(small.problem, optimum.power)])
        assert optimum.optimal
        assert optimum.objective == optimum.bound == try_all(final)
        assignment = network.assignment(optimum.assignment)
        check(costs.graph, costs.states, assignment)
        paid = tuple(optimum.costs[c] for c in (BYTES, TIME, BACKWARD))
        assert price(costs.graph, costs, assignment) == paid
    assert found["cpsat"].assignment == found["backtracking"].assignment


@pytest.mark.parametrize("toy", TOYS)
def test_a_budget_below_the_least_is_refused(toy: type[nn.Module]) -> None:
    """Both solvers say the least that would fit."""
    _, small, _ = network_of(toy())
    least = try_all(weighed(small.problem, [lambda c: c[BYTES]]))
    for solve in SOLVERS.values():
        assert optimize(small, solve, 60.0, memory=least).costs[BYTES] == least
        with pytest.raises(InfeasibleError, match=f"the least that would fit is {least:,} bytes"):
            optimize(small, solve, 60.0, memory=least - 1)


def test_a_contradiction_is_infeasible() -> None:
    """No row is left for a variable: simplification sees it."""
    network, _, _ = network_of(Chain())
    problem = network.problem
    problem.factor("impossible", [0], [])
    assert simplify(problem) is None


def test_what_cannot_be_split_is_known() -> None:
    """`possible` tells apart what is whole by choice and by need."""
    network, small, _ = network_of(Residual())
    can = possible(network, small)
    assert can["p_a_weight.stored"] and not can["p_n_weight.stored"]
