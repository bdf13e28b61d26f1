"""Parameters and gradients of a split model that are written to: nothing of it is lost unseen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()


torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)).double()


planned = planning.Once(lambda: planning.plan(copy.deepcopy(BASE), 2, args=(X,)))


def made() -> nn.Module:
    return copy.deepcopy(BASE)


def compared(write: Callable[[nn.Module], Any]) -> None:
    """Whether the whole and the split model give the same behind `write`."""
    write(whole := made())
    want = whole(X)

    def work(mesh: Mesh) -> None:
        write(split := shardwright.apply(made(), planned(), mesh))
        torch.testing.assert_close(split(X), want, rtol=0, atol=1e-12)

    run_ranks(2, work)


def _first_row(p: Tensor) -> None:
    p[0].zero_()


def _data(p: Tensor) -> None:
    p.data[1:2] *= 3


def _reshaped(p: Tensor) -> None:
    p.view(-1)[:5].fill_(0.5)


def _columns(p: Tensor) -> None:
    p.narrow(-1, 0, 2).mul_(2)


def _unknown(p: Tensor) -> None:
    p.renorm_(2, 0, 0.5)


def _made_anew(p: Tensor) -> None:
    nn.init.eye_(p)


def _product(p: Tensor) -> None:
    p.addmm_(p @ p.T, p)


def _product_into(p: Tensor) -> None:
    torch.mm(p @ p.T, p.clone(), out=p)


@pytest.mark.parametrize(
    "write",
    [_first_row, _data, _reshaped, _columns, _unknown, _made_anew, _product, _product_into],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("of_gradient", [False, True])
def test_what_would_be_lost_is_refused(write: Any, of_gradient: bool) -> None:
    """Torch gathers what such a view is of, and would write to the copy."""

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(made(), planned(), mesh)
        split(X).sum().backward()
        for name in ("0.weight", "2.weight"):
            p: Any = split.get_parameter(name)
            before = [q.clone().full_tensor() for q in (p.data, p.grad)]
            refused = False
            try:
                with torch.no_grad():
                    write(p.grad if of_gradient else p)
            except UsageError as error:
                assert "put them back" in str(error)
                refused = True
            assert refused or not torch.equal(
                before[of_gradient], (p.grad if of_gradient else p).full_tensor()
            )

    run_ranks(2, work)


def test_what_the_refusal_names_instead() -> None:
    def write(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            value = shardwright.full_tensors(model, {name: p.detach().clone()})[name]
            value[0] = 0
            if hasattr(model, "_shardwright_mesh"):
                value = shardwright.split_tensors(model, {name: value})[name]
            with torch.no_grad():
                p.copy_(value)

    def whole(model: nn.Module) -> None:
        if hasattr(model, "_shardwright_mesh"):
            return write(model)
        with torch.no_grad():
            for p in model.parameters():
                p[0] = 0

    compared(whole)


def test_views_are_read_and_those_of_parts_written() -> None:
    """Penalties of views leave gradients that clipping changes in place."""

    def write(model: nn.Module) -> None:
        loss: Any = model(X).sum()
        for p in model.parameters():
            loss = loss + sum(v.pow(2).sum() for v in (p.view(-1), p[0], p[1:3], p.flatten()[:2]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with torch.no_grad():
            for p in model.parameters():
                p.unsqueeze(0).mul_(2)
                p.detach().t().add_(1) if p.dim() == 2 else None

    compared(write)


def test_data_that_is_set_is_computed_with() -> None:
    def write(model: nn.Module) -> None:
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data * 2
        first = copy.deepcopy(model)(X)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        assert not torch.equal(first, model(X))
        for p, value in zip(list(model.parameters())[:1], kept, strict=False):
            p.data = value * 3

    compared(write)


def test_data_may_be_set_to_a_full_tensor() -> None:
    def write(model: Any) -> None:
        model[0].weight.data = torch.ones(24, 12).double() / 8
        model[0].bias.data = torch.arange(24.0).double()

    compared(write)


def test_data_of_another_shape_is_refused() -> None:
    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(made(), planned(), mesh)
        for value in (split[2].weight.data, split[0].weight.to_local().detach()):
            with pytest.raises(UsageError, match="another shape"):
                split[0].weight.data = value

    run_ranks(2, work)
