"""Tokens of a mixture that travel to the ranks that hold their experts, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import shard_range
from shardwright.planner.contract.plan_file import Dispatch, ModulePlan, ParameterPlan
from shardwright.runtime.communication.audit import Call, count_collectives
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.layers import apply_module
from tests.ranks import run_ranks

EXPERTS, WIDTH, INNER, CHOSEN, ROWS = 5, 6, 4, 2, 7


class Experts(nn.Module):
    """A loop over the experts that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.count = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER, dtype=torch.float64))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.count):
            token, at = torch.where(chosen == expert)
            made = F.linear(F.silu(F.linear(x[token], self.up[expert])), self.down[expert])
            out = out.index_add(0, token, made * weights[token, at, None])
        return out


def spread() -> ModulePlan:
    return ModulePlan(
        parameters={
            "up": ParameterPlan(placement=f"{EXPERTS}@ep, {INNER}, {WIDTH}"),
            "down": ParameterPlan(placement=f"{EXPERTS}@ep, {WIDTH}, {INNER}"),
        },
        attributes={"count": f"{EXPERTS}@ep"},
        dispatch=Dispatch(tokens="x", experts="chosen", weights="weights", count=EXPERTS),
    )


def routed(ranks: int, idle: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of all ranks, their experts and weights; with `idle` nobody takes the last expert."""
    torch.manual_seed(1)
    x = torch.randn(ranks * ROWS, WIDTH, dtype=torch.float64)
    known = EXPERTS - idle
    chosen = torch.stack([torch.randperm(known)[:CHOSEN] for _ in range(len(x))])
    return x, chosen, torch.rand(len(x), CHOSEN, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ranks", "idle", "learns"),
    [
        (2, False, "all"),
        (3, True, "all"),
        (3, True, "experts"),
        (3, True, "tokens"),
        (4, False, "all"),
    ],
)
def test_equal_to_one_process(ranks: int, idle: bool, learns: str) -> None:
    """Experts that ranks do not divide; a rank may get no token, and then has no gradient."""
    torch.manual_seed(0)
    whole = Experts()
    whole.requires_grad_(learns != "tokens")
    x, chosen, weights = routed(ranks, idle)
    leaves = [x.requires_grad_(learns != "experts"), weights.requires_grad_(learns != "experts")]
    want = whole(x, chosen, weights)
    want.square().sum().backward()

    def work(mesh: Mesh) -> None:
        local = copy.deepcopy(whole)
        local.zero_grad()
        apply_module(local, spread(), mesh, path="experts")
        rank = mesh["ep"].rank
        own = slice(ROWS * rank, ROWS * (rank + 1))
        mine = [leaf.detach()[own].clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        out = local(mine[0], chosen[own], mine[1])
        torch.testing.assert_close(out, want[own], rtol=0, atol=1e-9)
        out.square().sum().backward()
        for leaf, part in zip(leaves, mine, strict=True):
            if leaf.grad is not None:
                torch.testing.assert_close(part.grad, leaf.grad[own])
        boundary: Any = local._shardwright
        first, last = boundary.dispatcher.held[rank]
        for (_, p), (_, q) in zip(local.named_parameters(), whole.named_parameters(), strict=True):
            if q.grad is not None:
                found = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(found, q.grad[first:last])

    run_ranks(ranks, work, {"ep": ranks, "tp": 1})


def test_without_gradients_and_without_own_tokens() -> None:
    whole = Experts()
    x, chosen, weights = routed(2, idle=False)
    want = whole(x[:ROWS], chosen[:ROWS], weights[:ROWS])

    def work(mesh: Mesh) -> None:
        local = copy.deepcopy(whole)
        apply_module(local, spread(), mesh, path="experts")
        own = slice(0, ROWS) if mesh["ep"].rank == 0 else slice(0, 0)
        with torch.no_grad():
            torch.testing.assert_close(local(x[own], chosen[own], weights[own]), want[own])

    run_ranks(2, work, {"ep": 2, "tp": 1})


def test_what_is_sent() -> None:
    """Numbers of tokens, tokens, weights, and the results back."""
    whole = Experts()
    x, chosen, weights = routed(2, idle=False)

    def work(mesh: Mesh) -> list[Call]:
        local = copy.deepcopy(whole)
        apply_module(local, spread(), mesh, path="experts")
        own = slice(ROWS * mesh["ep"].rank, ROWS * (mesh["ep"].rank + 1))
        with count_collectives() as calls, torch.no_grad():
            local(x[own], chosen[own], weights[own])
        return calls

    pairs, first = ROWS * CHOSEN, EXPERTS - EXPERTS // 2
    for rank, calls in enumerate(run_ranks(2, work, {"ep": 2, "tp": 1})):
        came = int(((chosen < first) == (rank == 0)).sum())
        assert calls == [
            Call("all_gather", 8 * EXPERTS),
            Call("all_to_all", 8 * pairs * WIDTH),
            Call("all_to_all", 8 * pairs),
            Call("all_to_all", 8 * came * WIDTH),
        ]


def test_an_expert_that_there_is_not() -> None:
    def work(mesh: Mesh) -> None:
        local = Experts()
        apply_module(local, spread(), mesh, path="experts")
        x, chosen, weights = routed(1, idle=False)
        with pytest.raises(UsageError, match="'experts' was given expert 5, and it has 5"):
            local(x, chosen + 1, weights)

    run_ranks(2, work, {"ep": 2, "tp": 1})


class Lying(Experts):
    """Tokens that lie by expert: [E * T, H], or [E, T, H]."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = F.silu(torch.bmm(x.view(self.count, -1, WIDTH), self.up.mT))
        return torch.bmm(inner, self.down.mT).view(x.shape)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("each", [(3, 2), (0, 4, 1), (2, 2, 2, 2, 2, 2), (0, 0)])
def test_tokens_that_lie_by_expert(each: tuple[int, ...], dims: int) -> None:
    """Ranks with more or fewer tokens for each expert, or none, and one without experts."""
    torch.manual_seed(0)
    whole, total = Lying(), sum(each)
    x = torch.randn(EXPERTS, total, WIDTH, dtype=torch.float64, requires_grad=True)
    want = whole(x)
    want.square().sum().backward()
    spec = spread().model_copy(update={"dispatch": Dispatch(tokens="x", count=EXPERTS)})

    def work(mesh: Mesh) -> list[Call]:
        local, rank = copy.deepcopy(whole), mesh["ep"].rank
        local.zero_grad()
        apply_module(local, spec, mesh, path="experts")
        own = slice(sum(each[:rank]), sum(each[: rank + 1]))
        mine = x.detach()[:, own].clone().requires_grad_()
        with count_collectives() as calls:
            out = local(mine if dims == 3 else mine.flatten(0, 1))
        torch.testing.assert_close(out.view(mine.shape), want[:, own], rtol=0, atol=1e-9)
        out.square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(mine.grad, x.grad[:, own])
        first, last = local._shardwright.dispatcher.held[rank]  # type: ignore[union-attr]
        for (_, p), (_, q) in zip(local.named_parameters(), whole.named_parameters(), strict=True):
            assert q.grad is not None
            found = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found, q.grad[first:last])
        return calls

    for rank, calls in enumerate(run_ranks(len(each), work, {"ep": len(each), "tp": 1})):
        first, last = shard_range(EXPERTS, rank, len(each))
        assert calls == [
            Call("all_gather", 8 * EXPERTS),
            Call("all_to_all", 8 * EXPERTS * each[rank] * WIDTH),
            Call("all_to_all", 8 * (last - first) * total * WIDTH),
        ]


class Counted(Experts):
    """Tokens [T, H] that lie by expert, and how many each has; it gives more for each."""

    def forward(self, x: Tensor, counts: Any) -> Tensor:  # pyright: ignore
        each = counts.tolist() if isinstance(counts, Tensor) else counts
        parts = zip(x.split(each), self.up, strict=True)
        return torch.cat([F.silu(F.linear(part, up)) for part, up in parts])


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("each", [[(0, 3, 1, 0, 2), (4, 0, 0, 1, 1)], [(0, 0, 0, 2, 0)] * 3])
def test_tokens_that_lie_by_expert_with_counts(each: list[tuple[int, ...]], listed: bool) -> None:
    """Of some ranks no expert gets a token; what it gives is not as wide as a token."""
    torch.manual_seed(0)
    whole = Counted()
    dispatch = Dispatch(tokens="x", counts="counts", count=EXPERTS, width=INNER)
    spec = spread().model_copy(update={"dispatch": dispatch})
    given = [torch.randn(sum(n), WIDTH, dtype=torch.float64, requires_grad=True) for n in each]
    want = [whole(x, [*n]) for x, n in zip(given, each, strict=True)]
    torch.stack([out.square().sum() for out in want]).sum().backward()

    def work(mesh: Mesh) -> list[Call]:
        local, rank = copy.deepcopy(whole), mesh["ep"].rank
        local.zero_grad()
        apply_module(local, spec, mesh, path="experts")
        mine = given[rank].detach().clone().requires_grad_()
        counts: Any = [*each[rank]] if listed else torch.tensor(each[rank], dtype=torch.int32)
        with count_collectives() as calls:
            out = local(mine, counts)
        torch.testing.assert_close(out, want[rank], rtol=0, atol=1e-9)
        out.square().sum().backward()
        torch.testing.assert_close(mine.grad, given[rank].grad)
        first, last = local._shardwright.dispatcher.held[rank]  # type: ignore[union-attr]
        found = torch.zeros_like(local.up) if local.up.grad is None else local.up.grad
        assert whole.up.grad is not None
        torch.testing.assert_close(found, whole.up.grad[first:last])
        return calls

    ranks = len(each)
    for rank, calls in enumerate(run_ranks(ranks, work, {"ep": ranks, "tp": 1})):
        first, last = shard_range(EXPERTS, rank, ranks)
        came = sum(sum(n[first:last]) for n in each)
        assert calls == [
            Call("all_gather", 8 * EXPERTS),
            Call("all_to_all", 8 * sum(each[rank]) * WIDTH),
            Call("all_to_all", 8 * came * INNER),
        ]


@pytest.mark.parametrize(
    ("counts", "text"),
    [([1, 1, 1, 1, 1], "7 rows, and its 5 experts have 5"), ([7], "expert 0, and it has 5")],
)
def test_counts_of_other_tokens(counts: list[int], text: str) -> None:
    dispatch = Dispatch(tokens="x", counts="counts", count=EXPERTS, width=INNER)
    spec = spread().model_copy(update={"dispatch": dispatch})

    def work(mesh: Mesh) -> None:
        local = Counted()
        apply_module(local, spec, mesh, path="experts")
        with pytest.raises(UsageError, match=f"'experts' was given {text}"):
            local(torch.randn(7, WIDTH, dtype=torch.float64), counts)

    run_ranks(2, work, {"ep": 2, "tp": 1})


def test_tokens_that_do_not_lie_by_expert() -> None:
    spec = spread().model_copy(update={"dispatch": Dispatch(tokens="x", count=EXPERTS)})

    def work(mesh: Mesh) -> None:
        local = Lying()
        apply_module(local, spec, mesh, path="experts")
        with pytest.raises(UsageError, match="was given 7 rows, and its 5 experts have 5"):
            local(torch.randn(7, WIDTH, dtype=torch.float64))

    run_ranks(2, work, {"ep": 2, "tp": 1})
