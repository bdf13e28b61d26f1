"""Random numbers that are drawn for parameters of a split model: those of the unsplit model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.tensors.layouts import PlannedShard
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()


class Fused(nn.Module):
    """Its weight is split so that each rank has some rows of each half."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(12, 48), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, dim=-1)
        return self.down(a.tanh() * b)


torch.manual_seed(0)
BASE = Fused().double()


planned = planning.Once(lambda tp: planning.plan(copy.deepcopy(BASE), tp, args=(X,)), 2, 3)


def _normal(p: Tensor, g: torch.Generator) -> None:
    p.normal_(generator=g)


def _init(p: Tensor, g: torch.Generator) -> None:
    nn.init.trunc_normal_(p, std=0.3, generator=g)


def _data(p: Tensor, g: torch.Generator) -> None:
    p.data.uniform_(-1, 1, generator=g)


def _noise(p: Tensor, g: torch.Generator) -> None:
    p.add_(torch.rand_like(p, generator=g), alpha=0.1)


def _bernoulli(p: Tensor, g: torch.Generator) -> None:
    p.mul_(torch.bernoulli(p.sigmoid(), generator=g))


def _written(p: Tensor, g: torch.Generator) -> None:
    p.bernoulli_(p.sigmoid(), generator=g)


def _integers(p: Tensor, g: torch.Generator) -> None:
    p.random_(0, 9, generator=g)


DRAWS = (_normal, _init, _data, _noise, _bernoulli, _written, _integers)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tp", [2, 3])
def test_parts_are_those_of_what_is_drawn_for_the_whole(
    draw: Callable[[Tensor, torch.Generator], Any], tp: int
) -> None:
    """Of ranks that stand elsewhere, the first one's numbers are taken."""

    def drawn(model: nn.Module, rank: int = 0) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(7 + rank)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    draw(p, g)
        return model(X), g.get_state()

    want, state = drawn(copy.deepcopy(BASE))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(tp), mesh)
        weight: Any = split.get_parameter("both.weight")
        assert isinstance(weight, DTensor) and isinstance(weight.placements[0], PlannedShard)
        found, stands = drawn(split, mesh["tp"].rank)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
        assert torch.equal(stands, state)

    run_ranks(tp, work)


@pytest.mark.parametrize("inference", [False, True])
def test_dropout_of_a_parameter(inference: bool) -> None:
    """In inference mode it is one op. (Ranks as threads share one generator: they take turns.)"""

    def work(mesh: Mesh) -> float:
        split = shardwright.apply(copy.deepcopy(BASE), planned(2), mesh)
        with torch.inference_mode(inference):
            dropped: Any = nn.functional.dropout(split.get_parameter("both.weight"), 0.5)
            whole = dropped.full_tensor()
        kept = whole != 0
        expected = BASE.both.weight * 2
        torch.testing.assert_close(whole[kept], expected[kept].detach())
        return kept.double().mean().item()

    for share in run_ranks(2, work):
        assert 0.3 < share < 0.7


def test_what_would_be_drawn_for_a_copy_is_refused() -> None:
    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(2), mesh)
        p = split.get_parameter("both.weight")
        with torch.no_grad(), pytest.raises(UsageError, match="would be lost"):
            p[0].normal_()

    run_ranks(2, work)


def test_what_says_something_of_a_tensor_looks_at_the_whole() -> None:
    want, counts = torch.unique(BASE.both.weight.round(decimals=1), return_counts=True)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(2), mesh)
        p: Any = split.get_parameter("both.weight").detach()
        found, number = torch.unique(p.round(decimals=1), return_counts=True)
        assert torch.equal(found, want) and torch.equal(number, counts)
        assert torch.allclose(p, p + 1e-12) and not torch.allclose(p, p * (p > p.min()))

    run_ranks(2, work)


def test_anomalies_are_found() -> None:
    """By autograd's own mode, which is the whole process's, so around all ranks."""

    def lost(model: nn.Module) -> None:
        model(X).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (model(X) * float("nan")).sqrt().sum().backward()

    with torch.autograd.set_detect_anomaly(True):
        lost(copy.deepcopy(BASE))
        run_ranks(2, lambda mesh: lost(shardwright.apply(copy.deepcopy(BASE), planned(2), mesh)))
