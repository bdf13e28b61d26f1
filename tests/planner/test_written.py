"""Parameters that model code changes in place, once, before it uses them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks


class Rescaled(nn.Module):
    """Halves a matrix, for inference say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.done = Mlp(), Mlp(), False

    def rescale(self, weight: Tensor) -> None:
        weight.div_(2).mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                for mlp in (self.first, self.second):
                    self.rescale(mlp.down.weight)
            self.done = True
        return self.second(x + self.first(x))


class FewRows(Rescaled):
    """Changes the first rows only."""

    def rescale(self, weight: Tensor) -> None:
        weight[:5].mul_(2)


class ByOther(Rescaled):
    """Changes a matrix by another one."""

    def rescale(self, weight: Tensor) -> None:
        weight.sub_(self.first.up.weight.mean())


class Bias(Rescaled):
    """What is Partial in use may not be written so."""

    def rescale(self, weight: Tensor) -> None:
        super().rescale(weight)
        for mlp in (self.first, self.second):
            mlp.down.bias.mul_(2)


@pytest.mark.parametrize(
    ("make", "split"), [(Rescaled, True), (FewRows, False), (ByOther, False), (Bias, None)]
)
def test_equals_the_whole_model(make: type[Rescaled], split: bool | None) -> None:
    """What is changed element by element is split all the same; else it stays replicated."""
    model = make().double()
    plan = planned(model, features(WIDTH), 2)
    split_found = {
        name
        for name, module in plan.modules.items()
        if "weight" in module.parameters and "@" in module.parameters["weight"].placement
    }
    assert split is None or split == ({"first.down", "second.down"} <= split_found)
    assert_equal(model, features(WIDTH), plan)


def test_what_was_changed_is_saved_changed() -> None:
    """The local part is what was written."""
    model = Rescaled().double()
    plan = planned(model, features(WIDTH), 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (x,) = features(WIDTH)(2, 7)

    def rank(mesh: Mesh) -> dict[str, Tensor]:
        local = apply(copy.deepcopy(model), plan, mesh)
        local(x)
        return full_tensors(local, dict(local.named_parameters()))

    for found in run_ranks(2, rank):
        for name, value in before.items():
            times = 1.5 if name.endswith("down.weight") else 1.0
            assert torch.equal(found[name], value * times), name
