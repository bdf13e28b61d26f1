"""Gradients averaged over copies that use other parameters, or in another order."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract import transitions
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.communication.replicas import average_gradients
from tests import planning
from tests.ranks import run_ranks


class Experts(nn.Module):
    """Each row goes to the expert that its sign says, those of the first row first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hit = (x.sum(-1) > 0).long()
        for expert in hit.unique_consecutive().tolist()[:2]:
            rows = (hit == expert).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[expert](x[rows]).square())
        return out


PLUS = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
ROWS = {
    "others": [PLUS, -PLUS],
    "in another order": [torch.cat([PLUS, -PLUS]), torch.cat([-2 * PLUS, PLUS])],
}


@pytest.mark.parametrize("case", ROWS)
def test_copies_may_use_other_experts(case: str) -> None:
    """Twice in a row; an expert that no copy uses has no gradient."""
    whole = Experts()
    for _ in range(2):
        torch.stack([whole(rows).sum() for rows in ROWS[case]]).mean().backward()

    def work(mesh: Mesh) -> tuple[list[Tensor | None], dict[str, int]]:
        model = Experts()
        average_gradients(model, mesh, ["dp"])
        model(ROWS[case][mesh["dp"].rank]).sum().backward()
        with count_collectives() as calls:
            model(ROWS[case][mesh["dp"].rank]).sum().backward()
        return [p.grad for p in model.parameters()], counts(calls)

    for found, calls in run_ranks(2, work, {"dp": 2}):
        for got, want in zip(found, whole.parameters(), strict=True):
            assert (got is None) == (want.grad is None)
            torch.testing.assert_close(got, want.grad)
        assert calls == {"all_reduce": 2}  # who has which, and all gradients


def test_gradients_are_put_into_buckets() -> None:
    """As few for any order; what is larger than a bucket is alone."""
    most = transitions.BUCKET
    sizes = [4, most + 1, 0, most // 2, 8, most // 2 - 12, 2 * most]
    for order in permutations(sizes):
        found = [sorted(order[i] for i in bucket) for bucket in transitions.buckets(order)]
        assert found == [sorted(sizes)[:5], [most + 1], [2 * most]]
    assert transitions.buckets([]) == []
    assert transitions.buckets([0]) == [[0]]


class Kinds(nn.Module):
    """Parameters of several dtypes, strides and sizes; each copy uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        sizes = [(3,), (64,), (), (0,), (2, 5), (7,), (40,), (4,)]
        made = [torch.randn(n, generator=draw, dtype=torch.float64) for n in sizes]
        made[4] = made[4].t()
        made[5] = made[5].to(torch.complex128)
        made[7] = made[7].float()
        self.all = nn.ParameterList(made)
        self.frozen = nn.Parameter(made[0].clone(), requires_grad=False)

    def forward(self, x: Tensor, *used: int) -> Tensor:
        terms = [(self.all[i] * x.to(self.all[i].dtype)).abs().square().sum() for i in used]
        return torch.stack([term.double() for term in terms]).sum()


def test_gradients_of_all_kinds_are_averaged_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in a row; a gradient that is larger than a bucket is averaged where it is."""
    monkeypatch.setattr(transitions, "BUCKET", 300)
    used, x = [(0, 1, 2, 3, 5, 6), (1, 6, 4, 7, 2)], torch.tensor([2.0, 3.0]).double()
    whole = Kinds()
    for _ in range(2):
        torch.stack([whole(x[i], *used[i]) for i in range(2)]).mean().backward()

    def work(mesh: Mesh) -> tuple[list[Tensor | None], list[int], bool]:
        model, rank = Kinds(), mesh["dp"].rank
        average_gradients(model, mesh, ["dp"])
        model(x[rank], *used[rank]).backward()
        large: Any = model.all[1].grad
        at = large.data_ptr()
        with count_collectives() as calls:
            model(x[rank], *used[rank]).backward()
        stays = large.data_ptr() == at and model.all[1].grad is large
        return [p.grad for p in model.parameters()], [call.bytes for call in calls], stays

    for grads, sent, stays in run_ranks(2, work, {"dp": 2}):
        for got, want in zip(grads, whole.parameters(), strict=True):
            assert (got is None) == (want.grad is None)
            torch.testing.assert_close(got, want.grad, rtol=0, atol=1e-12)
        assert (sent[0], sorted(sent[1:])) == (9 * 4, [16, 112, 112, 320, 512])
        assert stays


def test_gradients_that_are_differentiated_again_are_averaged() -> None:
    """Those of the first backward pass, and of a loss that is made of them."""
    model = Blocks()
    plan = planning.plan(model, mesh=SIZES, args=(BATCH[0],))

    def both(model: Any, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parameters = [*model.first.parameters(), *model.last.parameters()]
        model.last(model.first(rows).tanh()).square().mean().backward(create_graph=True)
        grads: list[Any] = [p.grad for p in parameters]
        once = [getattr(g, "full_tensor", lambda g=g: g)() for g in grads]
        for p in parameters:
            p.grad = None
        torch.stack([g.square().sum() for g in once]).sum().backward()
        twice: list[Any] = [p.grad for p in parameters]
        return once, [getattr(g, "full_tensor", lambda g=g: g)() for g in twice]

    want = both(copy.deepcopy(model), BATCH)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(model), plan, mesh)
        found = both(split, BATCH[mesh["dp"].rank])
        for got, expected in zip(found, want, strict=True):
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)

    run_ranks(4, work, SIZES)


def test_a_backward_pass_that_failed_leaves_nothing_behind() -> None:
    def work(mesh: Mesh) -> Tensor | None:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        average_gradients(layer, mesh, ["dp"])

        def fail(_: Tensor) -> None:
            raise ValueError("no")

        x = torch.ones(1, 2, requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(ValueError, match="no"):
            layer(x).sum().backward()
        layer.zero_grad()
        layer(torch.full((1, 2), float(mesh["dp"].rank))).sum().backward()
        return layer.weight.grad

    for found in run_ranks(2, work, {"dp": 2}):
        assert found is not None
        torch.testing.assert_close(found, torch.full((1, 2), 0.5))


def _as_it_is(model: Any) -> Any:
    return model


def _frozen_when_split(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


def _cast(model: Any) -> Any:
    return model.float().double()


def _loaded(model: Any) -> Any:
    model.load_state_dict(model.state_dict(), assign=True)
    return model


CHANGES = [_as_it_is, _frozen_when_split, _loaded, copy.deepcopy, _cast]


@pytest.mark.parametrize(
    ("change", "compiled"), [*((c, False) for c in CHANGES), (_cast, True), (copy.deepcopy, True)]
)
def test_a_model_that_was_changed_since_is_averaged(change: Any, compiled: bool) -> None:
    """What changes takes hooks off parameters, or brings new ones."""
    sizes = {"dp": 2, "tp": 1 if compiled else 2}
    config = LlamaConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=16,
        num_hidden_layers=1,
    )
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).float().double()
    ids = torch.arange(8).view(2, 4)
    plan = planning.plan(copy.deepcopy(whole), mesh=sizes)
    base = copy.deepcopy(whole).requires_grad_(change is not _frozen_when_split)
    whole(ids, labels=ids).loss.backward()

    def work(mesh: Mesh) -> None:
        split: Any = change(shardwright.apply(copy.deepcopy(base), plan, mesh))
        called = torch.compile(split, backend="eager") if compiled else split
        mine = ids[mesh["dp"].rank][None]
        called(mine, labels=mine).loss.backward()
        grads = {n: p.grad for n, p in split.named_parameters()}
        for name, grad in shardwright.full_tensors(split, grads).items():
            torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=0, atol=1e-6)

    run_ranks(2 * sizes["tp"], work, sizes)


class Blocks(nn.Module):
    """A layer of its own beside two blocks that a backward pass runs again, inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for i, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True).tanh()  # type: ignore[union-attr]
        return self.last(x) * self.first.weight.sum()


BATCH = torch.arange(24).view(2, 3, 4).double() / 24
SIZES = {"dp": 2, "tp": 2}


def _blocks() -> Any:
    return planning.plan(Blocks(), mesh=SIZES, args=(BATCH[0],))


def test_backward_passes_inside_of_another_are_averaged() -> None:
    """What the outer one had made before they began, too."""
    whole, plan = Blocks(), _blocks()
    for _ in range(2):
        whole(BATCH).square().mean().backward()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(Blocks(), plan, mesh)
        for _ in range(2):
            split(BATCH[mesh["dp"].rank]).square().mean().backward()
        grads = {n: p.grad for n, p in split.named_parameters()}
        for name, grad in shardwright.full_tensors(split, grads).items():
            torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=0, atol=1e-12)

    run_ranks(4, work, SIZES)


def _own_leaves(model: Any, x: Tensor) -> None:
    own = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, own, (x,)).sum().backward()


def _hooked(model: Any, x: Tensor) -> None:
    model.first.weight.register_post_accumulate_grad_hook(lambda p: p.mul_(0.5))
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (
            lambda m, x: torch.autograd.grad(m.last(x).sum(), [*m.last.parameters()]),
            "Call backward",
        ),
        (_own_leaves, "of the model's own parameters"),
        (_hooked, "do after backward"),
    ],
)
def test_gradients_that_nobody_averages_are_refused(use: Any, why: str) -> None:
    plan = _blocks()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(Blocks(), plan, mesh)
        with pytest.raises(UsageError, match=why):
            use(split, BATCH[mesh["dp"].rank])

    run_ranks(4, work, SIZES)


def test_a_gradient_within_a_loss_is_that_of_each_copy() -> None:
    whole, plan = Blocks(), _blocks()

    def loss(model: Any, rows: Tensor) -> Tensor:
        out = model.last(model.first(rows)).tanh().sum()
        (found,) = torch.autograd.grad(out, model.first.weight, create_graph=True)
        return out + found.square().sum()

    torch.stack([loss(whole, rows) for rows in BATCH]).mean().backward()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(Blocks(), plan, mesh)
        loss(split, BATCH[mesh["dp"].rank]).backward()
        for name in ("first.weight", "last.weight"):
            grad: Any = split.get_parameter(name).grad
            want = whole.get_parameter(name).grad
            torch.testing.assert_close(grad.full_tensor(), want, rtol=0, atol=1e-12)

    run_ranks(4, work, SIZES)
