"""Mixtures of experts that go around an expert without tokens are split as those that do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import ModelError
from tests.marks import long
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp

EXPERTS, CHOSEN, IDLE = 4, 2, 1
"""Experts, how many a token is given to, and the number of one that never is."""


class Mixture(nn.Module):
    """Chosen experts, weighted; subclasses say how the loop over them goes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        idle = torch.arange(EXPERTS, device=x.device) == IDLE
        weights, chosen = scores.masked_fill(idle, -100.0).softmax(-1).topk(CHOSEN, -1)
        return self.mixed(rows, weights, chosen).view(x.shape)

    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class ByNumel(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at, k = torch.where(chosen == i)
            rows = x[at]
            if rows.numel() == 0:
                continue
            out.index_add_(0, at, expert(rows) * weights[at, k, None])
        return out


class ByLength(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at, k = torch.where(chosen == i)
            if len(at) == 0: continue  # noqa: E701  # fmt: skip
            out[at] += expert(x[at]) * weights[at, k, None]
        return out


class ByLengthWithin(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i in range(EXPERTS):
            at, k = torch.where(chosen == i)
            if len(at) > 0:
                out[at] += self.experts[i](x[at]) * weights[at, k, None]
        return out


class ByShape(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at, k = torch.where(chosen == i)
            if at.shape[0] == 0:
                continue
            out.index_add_(0, at, expert(x[at]) * weights[at, k].unsqueeze(-1))
        return out


class ByMask(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            if mask.any():
                weight = (weights * (chosen == i)).sum(-1)[mask]
                out[mask] += expert(x[mask]) * weight[:, None]
        return out


class ByNoMask(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            if not mask.any():
                continue
            weight = (weights * (chosen == i)).sum(-1)[mask]
            out[mask] += expert(x[mask]) * weight[:, None]
        return out


class ByCounts(Mixture):
    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            at, k = torch.where(chosen == i)
            out[at] += self.experts[i](x[at]) * weights[at, k, None]
        return out


class Sorted(Mixture):
    def mixed(self, x, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        parts = x[order // CHOSEN].split(counts)
        done = torch.cat([e(part) for e, part in zip(self.experts, parts, strict=True)])
        done = done * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // CHOSEN, done)


class Kept(Mixture):
    """What is added is another tensor each time: without an expert, that of before."""

    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            if mask.any():
                out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return out


class Filled(Mixture):
    """One expert a token, and what they make is put where nothing was before."""

    def mixed(self, x, weights, chosen):
        out = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen[:, 0] == i
            if mask.any():
                out[mask] = expert(x[mask]) * weights[mask, :1]
        return out


class Counted(Mixture):
    """How many experts were used counts, too."""

    def mixed(self, x, weights, chosen):
        out, used = torch.zeros_like(x), 0
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            if mask.any():
                out[mask] += expert(x[mask])
                used += 1
        return out / used


class Block(nn.Module):
    def __init__(self, mixture: type[Mixture]) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), mixture()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.mixture(self.norm(x)))


def model(mixture: type[Mixture], blocks: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(mixture) for _ in range(blocks))).double().eval()


SPLIT = (
    ByNumel,
    ByLength,
    ByLengthWithin,
    ByShape,
    ByMask,
    ByNoMask,
    ByCounts,
    Sorted,
    Kept,
    Filled,
)


@pytest.mark.parametrize("tp", [long(2), 3])
@pytest.mark.parametrize("mixture", SPLIT)
def test_experts_are_split(mixture: type[Mixture], tp: int) -> None:
    """Values and gradients are those of the whole, with an expert that no token is given to."""
    made = model(mixture)
    plan = planned(made, features(WIDTH), tp)
    assert plan.opaque == {}
    share = plan.predicted.parameter_bytes[0] / plan.predicted.unsharded_bytes
    assert share < (0.52 if tp == 2 else 0.38)
    assert_equal(made, features(WIDTH), plan, collectives=False)


def test_what_more_depends_on_stays_whole() -> None:
    made = model(Counted)
    plan = planned(made, features(WIDTH), 2)
    assert plan.opaque == {"module Counted": 2}
    assert_equal(made, features(WIDTH), plan, collectives=False)


class Stacked(ByNumel):
    """All experts in two parameters, of which a pass reads its own, beside one for all rows."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 3 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 3 * WIDTH, WIDTH))
        self.shared = Mlp()

    def mixed(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for i in range(EXPERTS):
            at, k = torch.where(chosen == i)
            if at.numel() == 0:
                continue
            done = F.silu(x[at] @ self.up[i]) @ self.down[i]
            out.index_add_(0, at, done * weights[at, k, None])
        return out + self.shared(x)


@pytest.mark.parametrize("tp", [long(2), 3, long(4)])
@pytest.mark.parametrize("mixture", [ByNumel, ByMask, ByCounts, Stacked])
def test_the_root_itself(mixture: type[Mixture], tp: int) -> None:
    """The sum of the experts is made at its own boundary, once, and none in a pass."""
    made = mixture().double().eval()
    plan = planned(made, features(WIDTH), tp)
    share = plan.predicted.parameter_bytes[0] / plan.predicted.unsharded_bytes
    assert share < {2: 0.52, 3: 0.38, 4: 0.28}[tp]
    changing = {name for name, m in plan.modules.items() if m.inputs or m.outputs}
    assert "" in changing <= {"", "router"}
    assert_equal(made, features(WIDTH), plan)


def test_a_folded_stack() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(ByMask) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    made = Stack().double().eval()
    plan = planned(made, features(WIDTH), 2)
    assert plan.predicted.parameter_bytes[0] < 0.52 * plan.predicted.unsharded_bytes
    assert_equal(made, features(WIDTH), plan, collectives=False)


class Dropped(nn.Module):
    """Blocks that data has it go around, each for itself: `LayerDrop` by what all ranks read."""

    limits: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("limits", torch.tensor([2.0, 0.0, 0.5, -1.0]).double())

    def forward(self, x: Tensor) -> Tensor:
        always = False
        for i, layer in enumerate(self.layers):
            skip = self.limits[i] > 1.0 - x.detach().abs().clamp(max=0.1).amax()
            if not skip or always:
                x = layer(x)
        return self.last(x)


class Passed(Dropped):
    """The same by going on with the next block."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.limits[i] > 0.3 + x.detach().abs().clamp(max=0.1).amax():
                continue
            x = layer(x)
        return self.last(x)


class Flagged(Dropped):
    """The same by a flag."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            skips = False
            if self.limits[i] > 0.3 + x.detach().abs().clamp(max=0.1).amax():
                skips = True
            if not skips:
                x = layer(x)
        return self.last(x)


class Widened(Dropped):
    """What it goes around may give more numbers: code behind it would see."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.limits[i] < x.detach().amax():
                x = torch.cat([layer(x), x], 1)
        return self.last(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", [Dropped, Passed, Flagged])
def test_blocks_that_code_goes_around(kind: type[Dropped], tp: int) -> None:
    made = kind().double().eval()
    plan = planned(made, features(WIDTH), tp)
    assert plan.opaque == {}
    assert plan.predicted.parameter_bytes[0] < 0.6 * plan.predicted.unsharded_bytes
    assert_equal(made, features(WIDTH), plan, collectives=False)


def test_what_is_handed_on_has_the_shape_that_was_there() -> None:
    with pytest.raises(ModelError, match="reads numbers off data"):
        planned(Widened().double().eval(), features(WIDTH), 2)
