"""Mixtures whose tokens lie by expert, as many for each: they are sent as they lie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright
from shardwright.planner.experts.probe import Mixture, fault
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.test_mixtures import BESIDE, EXPERTS, SUM, WIDTH, Experts
from tests.ranks import run_ranks


class Lying(Experts):
    """Tokens that lie by expert, [E, T, H] or [E * T, H], and one batched product."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        lying = x.view(self.experts, -1, x.shape[-1])
        made = self.of_each(torch.bmm(lying, self.up.mT), lying)
        return made if x.dim() == 3 else made.flatten(0, 1)

    def of_each(self, inner: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(inner), self.down.mT)


class LyingTogether(Lying):
    """Divided by the mean of the expert's tokens."""

    def of_each(self, inner: Tensor, x: Tensor) -> Tensor:
        return super().of_each(inner, x) / x.square().mean((1, 2), keepdim=True)


class LyingByNumber(Lying):
    """The first expert does something else."""

    def of_each(self, inner: Tensor, x: Tensor) -> Tensor:
        made = super().of_each(inner, x)
        return torch.cat([2 * made[:1], made[1:]])


class LyingByOthers(Lying):
    """Adds what the expert before was given."""

    def of_each(self, inner: Tensor, x: Tensor) -> Tensor:
        return super().of_each(inner, x) + x.roll(1, 0)


def lying_of(cls: type[Experts], dims: int) -> str | None:
    with torch.device("meta"):
        module = cls()
    rows, count = {"up": EXPERTS, "down": EXPERTS}, {"experts": EXPERTS}
    return fault(module, Mixture("x", None, None, EXPERTS, 0, WIDTH, rows, count, dims=dims))


@pytest.mark.parametrize("dims", [2, 3])
def test_tokens_that_lie_by_expert_may_travel(dims: int) -> None:
    assert lying_of(Lying, dims) is None
    for cls, why in ((LyingTogether, BESIDE), (LyingByNumber, SUM), (LyingByOthers, SUM)):
        found = lying_of(cls, dims)
        assert found is not None and why in found


class Counted(nn.Module):
    """One product for each expert, with the tokens that lie at it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.experts = EXPERTS
        self.weight = nn.Parameter(torch.empty(EXPERTS, inner, width))

    def forward(self, x: Tensor, counts: Any) -> Tensor:
        parts = x.split(counts.tolist() if isinstance(counts, Tensor) else counts)
        return torch.cat([self.one(part, n) for n, part in enumerate(parts)])

    def one(self, x: Tensor, expert: int) -> Tensor:
        return F.linear(x, self.weight[expert])


class CountedTogether(Counted):
    """Divided by how many tokens the expert has."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert) / len(x)


class CountedByNumber(Counted):
    """The first expert does something else."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert) * (1 + (expert == 0))


@pytest.mark.parametrize("listed", [False, True])
def test_tokens_with_counts_may_travel(listed: bool) -> None:
    for cls, why in ((Counted, None), (CountedTogether, BESIDE), (CountedByNumber, SUM)):
        with torch.device("meta"):
            module = cls(WIDTH, 64)
        held: Any = {"counts": "counts", "listed": listed, "given": 64}
        lying = (EXPERTS, 1, WIDTH, {"weight": EXPERTS}, {"experts": EXPERTS})
        found = fault(module, Mixture("x", None, None, *lying, **held))
        assert found is None if why is None else found is not None and why in found


class Routed(nn.Module):
    """Tokens sorted by expert on their way through two modules, each with a weight for each."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.enter, self.router = nn.Linear(16, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down, self.listed = Counted(WIDTH, 64), Counted(64, WIDTH), listed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        rows = hidden.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts: Any = chosen.flatten().bincount(minlength=EXPERTS)
        counts = counts.tolist() if self.listed else counts
        made = self.down(F.silu(self.up(rows[order // 2], counts)), counts)
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, made).view(hidden.shape)


class Filled(nn.Module):
    """Each expert gets the tokens that want it most, and as many."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.enter, self.router = nn.Linear(16, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.mixture, self.flat = Lying(), flat

    def forward(self, x: Tensor) -> Tensor:
        rows = self.enter(x)
        weights, chosen = self.router(rows).softmax(-1).mT.topk(3, -1)
        index = chosen[..., None].expand(*chosen.shape, WIDTH)
        own = rows[:, None].expand(-1, EXPERTS, -1, -1).gather(2, index) * weights[..., None]
        lying = own.transpose(0, 1).reshape(EXPERTS, -1, WIDTH)
        made = self.mixture(lying.flatten(0, 1) if self.flat else lying)
        made = made.view(EXPERTS, len(x), 3, WIDTH).transpose(0, 1)
        return rows.scatter_add(1, index.flatten(1, 2), made.flatten(1, 2))


@pytest.mark.parametrize(
    ("model", "mixtures", "mesh"),
    [
        (Filled(True), ["mixture"], {"ep": 4, "tp": 1}),
        (Filled(False), ["mixture"], {"ep": 2, "tp": 2}),
        (Filled(True), ["mixture"], {"ep": 8, "tp": 1}),
        (Routed(True), ["up", "down"], {"ep": 2, "tp": 2}),
        (Routed(False), ["up", "down"], {"ep": 4, "tp": 1}),
    ],
)
def test_tokens_that_lie_by_expert(
    model: nn.Module, mixtures: list[str], mesh: dict[str, int]
) -> None:
    """As in one process, on ranks without experts, too; what they are sent is predicted."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).double()
    for p in (p for name in mixtures for p in model.get_submodule(name).parameters()):
        nn.init.normal_(p, std=0.2)
    x = torch.randn(8, 7, 16, dtype=torch.float64)
    how: Any = {"args": (x,), "batch": 8, "seq": 7, "phase": "train"}
    plan = planning.plan(model, mesh=mesh, **how)
    for name in mixtures:
        dispatch = plan.modules[name].dispatch
        assert dispatch is not None and dispatch.experts is None
    shardwright.check(plan, model, args=(x,))
    want = model(x)
    want.sin().sum((1, 2)).mean().backward()

    def work(at: Mesh) -> dict[str, int]:
        split: Any = shardwright.apply(copy.deepcopy(model), plan, at)
        split.zero_grad()
        with count_collectives() as calls:
            out = split(x.chunk(mesh["ep"])[at["ep"].rank])
        torch.testing.assert_close(out, want.chunk(mesh["ep"])[at["ep"].rank], rtol=0, atol=1e-9)
        out.sin().sum((1, 2)).mean().backward()
        gradients = {n: p.grad for n, p in split.named_parameters()}
        for name, found in full_tensors(split, gradients).items():
            whole = model.get_parameter(name).grad
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-9)
        return counts(calls)

    predicted: dict[str, int] = {}
    for c in plan.predicted.collectives:
        predicted[c.kind] = predicted.get(c.kind, 0) + c.count * (c.phase == "forward")
    every = run_ranks(mesh["ep"] * mesh["tp"], work, mesh)
    for found in every[: min(EXPERTS, mesh["ep"]) * mesh["tp"]]:  # others read no parameters
        assert found == {kind: n for kind, n in predicted.items() if n}
