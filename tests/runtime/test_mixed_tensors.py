"""Parameters of a split model with plain tensors: these are full, or one clear line says so."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.tensors.split_tensor import SplitTensor
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()
IDS = torch.tensor([1, 3, 3, 20])

torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)).double()


planned = planning.Once(lambda: planning.plan(copy.deepcopy(BASE), 2, args=(X,)))


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "rows by ids": lambda m, w, b: w[IDS].pow(2).sum(),
    "embedding": lambda m, w, b: F.embedding(IDS, w).pow(2).sum(),
    "linear on outputs": lambda m, w, b: F.linear(m(X), w, b).tanh().sum(),
    "outputs times a bias": lambda m, w, b: (m[1](m[0](X)) * b).sum(),
    "one row of outputs times a bias": lambda m, w, b: (F.linear(m(X)[0], w) * b).sum(),
    "dot": lambda m, w, b: torch.dot(F.linear(m(X)[0], w), b),
    "number of a bias": lambda m, w, b: m(X).mean() + b[0] * 2,
    "distance to another": lambda m, w, b: (
        (w - torch.ones_like(BASE[0].weight)).norm() * m(X).sum()
    ),
    "one vector": lambda m, w, b: nn.utils.parameters_to_vector([w, b]).norm(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_plain_and_gradients_laid_out_as_parameters(name: str) -> None:
    def computed(model: Any) -> tuple[Tensor, list[Any], Any]:
        loss = LOSSES[name](model, model[0].weight, model[0].bias)
        by_hand = torch.autograd.grad(loss, model[0].weight, retain_graph=True, allow_unused=True)
        loss.backward()
        return loss, [p.grad for p in model.parameters()], by_hand[0]

    want, grads, by_hand = computed(copy.deepcopy(BASE))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        loss, found, of_weight = computed(split)
        assert type(loss) is Tensor
        torch.testing.assert_close(loss, want)
        for p, grad, wanted in zip(split.parameters(), found, grads, strict=True):
            assert (grad is None) == (wanted is None)
            if grad is not None:
                assert type(grad) is SplitTensor and grad.placements == p.placements
                torch.testing.assert_close(grad.full_tensor(), wanted)
        if by_hand is not None:
            full = getattr(of_weight, "full_tensor", lambda: of_weight)()
            torch.testing.assert_close(full, by_hand)

    run_ranks(2, work)


def test_full_values_are_written_and_states_go_both_ways() -> None:
    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        other = copy.deepcopy(BASE)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
            for p, q in zip(split.parameters(), other.parameters(), strict=True):
                p.copy_(q)
        torch.testing.assert_close(split(X), other(X))
        third = copy.deepcopy(BASE)
        third.load_state_dict(split.state_dict())
        torch.testing.assert_close(third(X), other(X))
        split.load_state_dict(BASE.state_dict())
        torch.testing.assert_close(split(X), BASE(X))

    run_ranks(2, work)


def test_split_and_unsplit_parameters_are_clipped_together() -> None:
    models = [copy.deepcopy(BASE) for _ in range(2)]

    def clipped(first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor]:
        (first(X) + second(X) * 2).sum().backward()
        both = [*first.parameters(), *second.parameters()]
        norm = nn.utils.clip_grad_norm_(both, 0.1)
        optimizer = torch.optim.AdamW(both, lr=0.1)
        optimizer.step()
        return norm, first(X) + second(X)

    want = clipped(*models)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        torch.testing.assert_close(clipped(split, copy.deepcopy(BASE)), want)

    run_ranks(2, work)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "copied": lambda p: p.copy_(torch.ones(12, 12)),
    "added in place": lambda p: p.add_(p.to_local()),
    "added": lambda p: p + p.to_local(),
    "in a list": lambda p: torch._foreach_add([p], [p.to_local()]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_are_not_taken_for_full_tensors(name: str) -> None:
    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        with torch.no_grad(), pytest.raises(UsageError, match=r"rank's part.*split_tensors"):
            REFUSED[name](split[0].weight)

    run_ranks(2, work)


def test_a_part_of_one_row_is_not_broadcast() -> None:
    """Of two rows each rank has one, which would broadcast to both."""
    small = nn.Sequential(nn.Linear(12, 2), nn.ReLU(), nn.Linear(2, 12)).double()
    plan = planning.plan(copy.deepcopy(small), 2, args=(X,), pins={"0.weight": "shard:0"})

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(small), plan, mesh)
        assert split[0].weight.to_local().shape == (1, 12)
        with torch.no_grad(), pytest.raises(UsageError, match="rank's part"):
            split[0].weight.copy_(split[0].weight.to_local())

    run_ranks(2, work)


def test_numbers_and_lists_are_those_of_the_full_tensor() -> None:
    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        bias, want = split[0].bias.detach(), BASE[0].bias.detach()
        assert bias.tolist() == want.tolist() and (bias.numpy() == want.numpy()).all()
        assert bias[3].item() == want[3].item() and bool((bias == bias).all())

    run_ranks(2, work)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 8), nn.Linear(8, 4))
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(torch.arange(3),))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(model), plan, mesh)
        with pytest.raises(UsageError, match="without sparse=True"):
            split(torch.arange(3)).sum().backward()

    run_ranks(2, work)
