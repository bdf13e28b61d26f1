"""Mixtures of experts: which modules' tokens may travel, and what is refused."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright
from shardwright.errors import InfeasibleError, PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.experts.probe import Mixture, fault
from tests import planning, zoo
from tests.planner.test_device import cpu, write

EXPERTS, FIRST, WIDTH, INNER, CHOSEN = 6, 3, 32, 64, 2


class Experts(nn.Module):
    """A loop over the experts that have tokens; subclasses do something else with them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.inner = EXPERTS, INNER
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.experts):
            token, at = torch.where(chosen == expert)
            if len(token):
                made = self.one(x[token], expert, chosen[token])
                out = out.index_add(0, token, made * weights[token, at, None])
        return out

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up[expert])), self.down[expert])


class Sorted(Experts):
    """Tokens sorted by expert."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, k = chosen.flatten().argsort(stable=True), chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=self.experts).tolist()
        parts = x[order // k].split(counts)
        done = torch.cat([self.one(p, e, chosen) for e, p in enumerate(parts)])
        done = done * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // k, done)


class Batched(Experts):
    """The matrices of each pair, and one batched product."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        inner = torch.einsum("th,tkih->tki", x, self.up[chosen])
        return torch.einsum("tki,tkhi,tk->th", F.silu(inner), self.down[chosen], weights)


class InRows(Experts):
    """The experts of a parameter one below the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS * INNER, WIDTH))

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        up = self.up.view(-1, self.inner, WIDTH if x.shape[-1] == WIDTH else x.shape[-1])[expert]
        down = self.down.view(-1, self.inner, x.shape[-1])[expert]
        return F.silu(F.linear(x, up)) @ down


class Behind(Experts):
    """Code behind the module's own, which has other names for what it is given."""

    @wraps(Experts.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore
        return self.code(*args, **kwargs)

    def code(self, tokens: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        return super().forward(tokens, index, shares)


class OfCapacity(Experts):
    """An expert takes its first tokens only."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        made = super().one(x, expert, chosen)
        return made * (torch.arange(len(x)) < 2)[:, None]


class OfLargeCapacity(Experts):
    """An expert takes no more tokens than a number that few tokens do not reach."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        made = super().one(x, expert, chosen)
        return made * (torch.arange(len(x)) < 256)[:, None]


class OtherwiseForMany(Experts):
    """An expert does something else with many tokens."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        made = super().one(x, expert, chosen)
        return made.tanh() if len(x) > 10_000 else made


class Averaged(Experts):
    """Divided by the number of the expert's tokens."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return super().one(x, expert, chosen) / len(x)


class ByNumber(Experts):
    """The first expert does something else."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return super().one(x, expert, chosen) * (2 if expert == 0 else 1)


class ByLateNumber(Experts):
    """An expert does something else that a copy with few experts does not have."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return super().one(x, expert, chosen) * (2 if expert == EXPERTS - 1 else 1)


class OfFirst(Experts):
    """The last experts give tokens as they are: parameters have rows for the first, or for all."""

    rows = FIRST

    def __init__(self) -> None:
        super().__init__()
        self.first = FIRST
        self.up = nn.Parameter(torch.empty(self.rows, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(FIRST, WIDTH, INNER))

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return super().one(x, expert, chosen) if expert < self.first else self.last(x, expert)

    def last(self, x: Tensor, expert: int) -> Tensor:
        return x


class RowsOfAll(OfFirst):
    rows = EXPERTS


class OfKinds(OfFirst):
    """One of the last experts gives zeros, by its number among them."""

    def last(self, x: Tensor, expert: int) -> Tensor:
        return x if expert - self.first < 2 else torch.zeros_like(x)


class LastOtherwiseForMany(OfFirst):
    def last(self, x: Tensor, expert: int) -> Tensor:
        return x.tanh() if len(x) > 1000 else x


class LastOfAll(OfFirst):
    """The numbers of its experts are no attributes."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return Experts.one(self, x, expert, chosen) if expert < FIRST else x


class ByOthers(Experts):
    """What an expert does depends on the token's other experts."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return super().one(x, expert, chosen) * (1 + chosen.sum(-1, keepdim=True))


class Normalized(Experts):
    """The weights of a token are made to add up to 1 once more."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


class Residual(Experts):
    """Adds the token itself, once."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x + super().forward(x, chosen, weights)


class Dropping(Experts):
    """Drops elements in training mode."""

    def one(self, x: Tensor, expert: int, chosen: Tensor) -> Tensor:
        return F.dropout(super().one(x, expert, chosen), 0.5, self.training)


class OwnGradient(Experts):
    """The gradient of a token's first weight alone."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        others = torch.cat([weights[:, :1], weights[:, 1:].detach()], 1)
        return super().forward(x, chosen, others)


class Counting(Experts):
    """Keeps how many tokens each expert had."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.counts = chosen.flatten().bincount(minlength=self.experts)
        return super().forward(x, chosen, weights)


class Buffered(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EXPERTS))


def found_of(cls: type[Experts]) -> str | None:
    with torch.device("meta"):
        module = cls()
    up = module.rows if isinstance(module, OfFirst) else EXPERTS
    of: Any = (
        {"up": up, "down": FIRST if isinstance(module, OfFirst) else EXPERTS},
        {name: n for name, n in vars(module).items() if name in ("experts", "first")},
    )
    return fault(module, Mixture("x", "chosen", "weights", EXPERTS, CHOSEN, WIDTH, *of))


@pytest.mark.parametrize("cls", [Experts, Sorted, Batched, InRows, Behind, OfFirst, RowsOfAll])
def test_tokens_may_travel(cls: type[Experts]) -> None:
    assert found_of(cls) is None


BESIDE, SUM = "depends on the other tokens", "is not the sum of the outputs of"


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (OfCapacity, BESIDE), (OfLargeCapacity, BESIDE), (Averaged, BESIDE), (ByNumber, SUM),
        (OtherwiseForMany, BESIDE), (ByOthers, SUM), (Normalized, SUM), (Residual, SUM),
        (Dropping, "in training mode"),
        (ByLateNumber, SUM), (OfKinds, SUM), (LastOtherwiseForMany, BESIDE),
        (LastOfAll, "its code fails"),
        (OwnGradient, "gradients are not the sums"), (Buffered, "it has buffers"),
        (Counting, "it changes its attribute 'counts'"),
    ],
)  # fmt: skip
def test_tokens_must_stay(cls: type[Experts], why: str) -> None:
    found = found_of(cls)
    assert found is not None and why in found


class Model(nn.Module):
    """A router, and experts that it gives each token to."""

    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.mixture = experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        return x + self.mixture(rows, chosen, weights).view(x.shape)


X = torch.randn(3, 19, WIDTH)


def test_the_plan_of_a_hand_written_mixture() -> None:
    plan = planning.plan(Model(Experts), mesh={"ep": 4, "tp": 1}, args=(X,))
    entry = plan.modules["mixture"]
    assert entry.dispatch is not None
    assert entry.dispatch.model_dump() == {
        "tokens": "x", "experts": "chosen", "weights": "weights", "count": EXPERTS,
    }  # fmt: skip
    assert entry.attributes == {"experts": "6@ep"}
    assert {e.placement for e in entry.parameters.values()} == {"6@ep, 64, 32", "6@ep, 32, 64"}
    each, router = 2 * INNER * WIDTH * 4, EXPERTS * WIDTH * 4
    assert plan.predicted.parameter_bytes == [n * each + router for n in (2, 2, 1, 1)]
    assert plan.workload.spread == plan.workload.replicas == 4
    kinds = {c.kind: c.count for c in plan.predicted.collectives if c.phase == "forward"}
    assert kinds == {"all_gather": 1, "all_to_all": 3}
    assert Plan.from_json(plan.to_json()) == plan


def test_the_busiest_rank_counts() -> None:
    """Twice the tokens are twice the bytes of all-to-all."""
    even, twice = (
        planning.plan(
            Model(Experts), mesh={"ep": 2, "tp": 1}, args=(X,), seq=4096, expert_imbalance=most
        )
        for most in (1, 2)
    )
    assert (even.workload.imbalance, twice.workload.imbalance) == (1, 2)
    assert "imbalance" not in even.to_json()
    (a, b) = (
        {c.kind: c.bytes for c in plan.predicted.collectives if c.phase == "forward"}
        for plan in (even, twice)
    )
    assert b == {"all_gather": a["all_gather"], "all_to_all": 2 * a["all_to_all"]}
    assert even.predicted.time_ns < twice.predicted.time_ns < 2 * even.predicted.time_ns
    with pytest.raises(UsageError, match="expert_imbalance must be from 1"):
        planning.plan(Model(Experts), mesh={"ep": 2, "tp": 1}, args=(X,), expert_imbalance=0.5)


def test_the_host_waits_once_a_mixture(tmp_path: Path) -> None:
    """It reads how many tokens each expert gets before it can send them."""
    times = []
    for wait in (0, 10**9):
        folder = tmp_path / str(wait)
        folder.mkdir()
        profile = write(folder, cpu() | {"host_wait_ns": wait})
        plan = planning.plan(Model(Experts), mesh={"ep": 2, "tp": 1}, args=(X,), device=profile)
        times.append(plan.predicted.time_ns)
    assert times[1] - times[0] == 10**9


@pytest.mark.parametrize(("batch", "spread"), [(4, True), (1, False)])
def test_meshes_with_experts_spread_are_compared(batch: int, spread: bool) -> None:
    """Each has the figures that it has when it is planned by itself, and the best is the plan."""
    how: dict[str, Any] = {"args": (X,), "batch": batch, "seq": 4096}
    found = planning.plan(Model(Experts), cluster=shardwright.Cluster(2, 2), **how)
    meshes = [choice.mesh for choice in found.meshes]
    both = {"dp": 2, "ep": 2, "tp": 1}
    expected = [{"ep": 4, "tp": 1}, {"ep": 2, "tp": 2}, both] if spread else []
    assert [mesh for mesh in expected if mesh not in meshes] == []
    assert any("ep" in mesh for mesh in meshes) == spread
    assert found.mesh == meshes[0]
    for choice in found.meshes:
        alone = planning.plan(Model(Experts), mesh=choice.mesh, gpus_per_host=2, **how)
        assert alone.predicted.memory is not None
        figures = alone.predicted.time_ns, alone.predicted.memory.total
        assert (choice.time_ns, choice.memory) == figures
        assert choice.mesh != found.mesh or alone.modules == found.modules


def test_no_mesh_spreads_experts_whose_tokens_stay() -> None:
    found = planning.plan(Model(Averaged), cluster=shardwright.Cluster(1, 2), args=(X,), batch=2)
    assert [choice for choice in found.meshes if "ep" in choice.mesh] == []


class Both(nn.Module):
    """A mixture whose tokens may travel, and one whose tokens may not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Model(Experts), Model(Residual)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def test_a_mixture_that_stays_is_noted() -> None:
    plan = planning.plan(Both(), mesh={"ep": 2, "tp": 1}, args=(X,))
    assert plan.modules["one.mixture"].dispatch is not None
    assert "each rank of ep holds all experts of 'other.mixture': its output" in plan.solver.note
    held = {whole.parameter.rpartition(".")[0] for whole in plan.replicated}
    assert "other.mixture" in held and "one.mixture" not in held


class Around(Experts):
    """A module around a mixture, which is called alike."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.inner = Experts()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.inner(x, chosen, weights)


def test_tokens_travel_once() -> None:
    plan = planning.plan(Model(Around), mesh={"ep": 2, "tp": 1}, args=(X,))
    assert [name for name, entry in plan.modules.items() if entry.dispatch] == ["mixture"]
    assert {e.placement for e in plan.modules["mixture.inner"].parameters.values()} == {
        "6@ep, 64, 32", "6@ep, 32, 64",
    }  # fmt: skip


class Told(Experts):
    """Computes something else if it is told more than it was when it was tested."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, more: Any = None) -> Tensor:
        weights = weights / weights.sum(-1, keepdim=True) if more else weights
        return super().forward(x, chosen, weights)


class Telling(Model):
    """Calls its mixture twice, and tells it something in the second call."""

    def __init__(self, *more: Any) -> None:
        super().__init__(Told)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        rows = y.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        return y + self.mixture(rows, chosen, weights, *self.more).view(x.shape)


@pytest.mark.parametrize("more", [True, [2, 3]])
def test_what_a_mixture_is_told(more: Any) -> None:
    """A flag, and what is none."""
    mesh = {"ep": 2, "tp": 1}
    assert planning.plan(Telling(), mesh=mesh, args=(X,)).modules["mixture"].dispatch is not None
    with pytest.raises(InfeasibleError, match="it is also called with 'more', which the test"):
        planning.plan(Telling(more), mesh=mesh, args=(X,))


def test_a_model_without_such_a_mixture() -> None:
    with pytest.raises(InfeasibleError, match="'mixture' looks like one, but its output"):
        planning.plan(Model(Averaged), mesh={"ep": 2, "tp": 1}, args=(X,))
    _, dense = zoo.build("llama")
    with pytest.raises(InfeasibleError, match="name the mesh dim dp instead"):
        planning.plan(dense, mesh={"ep": 2, "tp": 1})


@pytest.mark.parametrize(
    ("mesh", "dp", "text"),
    [
        ({"cp": 2, "ep": 2, "tp": 1}, "ddp", "ep cannot be combined with cp"),
        ({"dp": 2, "ep": 2, "tp": 1}, "fsdp", "ep cannot be combined with dp='fsdp'"),
    ],
)
def test_what_ep_does_not_go_with(mesh: dict[str, int], dp: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        planning.plan(Model(Experts), mesh=mesh, args=(X,), dp=dp)


def test_plans_that_contradict_themselves() -> None:
    plan = planning.plan(Model(Experts), mesh={"ep": 2, "tp": 1}, args=(X,)).model_dump()
    entry = plan["modules"]["mixture"]

    def edited(**changes: Any) -> Any:
        return plan | {"modules": plan["modules"] | {"mixture": entry | changes}}

    whole = {
        n: {"placement": e["placement"].replace("@ep", "")} for n, e in entry["parameters"].items()
    }
    other = {n: {"placement": "6, 64@ep, 32"} for n in ("up",)}
    for changes, text in (
        ({"dispatch": None}, "is not the dim of the experts"),
        ({"parameters": whole}, "each rank has all experts"),
        ({"parameters": other}, "is not the dim of the experts"),
        ({"attributes": {"experts": "12@ep"}}, "is not the dim of the experts"),
        ({"attributes": {"experts": "3@ep:2:1"}}, "is not the dim of the experts"),
        ({"dispatch": entry["dispatch"] | {"weights": None}}, "and not both"),
    ):
        with pytest.raises(PlanError, match=text):
            Plan.from_json(json.dumps(edited(**changes)))


class Penalized(nn.Module):
    """Adds up the weights of its experts."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.averages = averages
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.mean = Experts().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        out = self.experts(tokens, chosen, weights).view_as(x)
        if not self.averages:
            return out + sum(p.square().sum() for p in self.experts.parameters())
        with torch.no_grad():
            for mean, p in zip(self.mean.parameters(), self.experts.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
        return out + self.mean(tokens, chosen, weights).view_as(x)


def test_experts_that_code_outside_adds_up_stay() -> None:
    """A rank has some of them. Averages, which go over their elements, may be outside."""
    args = (torch.randn(3, 19, WIDTH),)
    with pytest.raises(InfeasibleError, match="code outside of it computes with 'experts.up'"):
        planning.plan(Penalized(False), mesh={"ep": 2, "tp": 1}, args=args)
    plan = planning.plan(Penalized(True), mesh={"ep": 2, "tp": 1}, args=args)
    assert plan.modules["experts"].parameters.keys() == {"up", "down"}
