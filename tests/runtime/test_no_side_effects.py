"""A model that is planned, split and run changes nothing of torch and peft for other code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as of_modules
from torch.nn.utils import parametrize
from torch.optim import optimizer as of_optimizers  # pyright: ignore[reportAttributeAccessIssue]

import shardwright
from shardwright.runtime.boundary.patches import PARAMETRIZE
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, llama, made


def seen() -> dict[str, Any]:
    """Attributes of classes of torch and peft, and tables of hooks for all modules."""
    hooks = [name for name in vars(of_modules) if name.startswith("_global_")]
    # `copy` of Python notes slots on classes, and transformers a helper while it makes weights.
    others = ("__slotnames__", "smart_apply")
    members = {name: value for name, value in vars(nn.Module).items() if name not in others}
    return {
        "nn.Module": members,
        "nn.Linear": {n: value for n, value in vars(nn.Linear).items() if n not in others},
        "nn.Parameter": dict(vars(nn.Parameter)),
        "hooks on all modules": {n: copy.copy(getattr(of_modules, n)) for n in hooks},
        "optimizers": copy.copy(of_optimizers._global_optimizer_pre_hooks),
        "DTensor": dict(vars(DTensor)),
        "parametrize": dict(vars(parametrize)),
        "peft": dict(vars(LoraLayer)),
        "dispatcher": dict(DTensor._op_dispatcher._custom_op_handlers),
    }


@pytest.fixture(scope="module")
def before_and_behind() -> tuple[dict[str, Any], dict[str, Any]]:
    before, base = seen(), made(llama)
    plan = planning.plan(copy.deepcopy(base), tp=2, phase="train")

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
        split(IDS).logits.sum().backward()
        optimizer.step()
        with shardwright.adding_adapters():
            get_peft_model(split, LoraConfig(target_modules=["q_proj", "down_proj"]))

    run_ranks(2, work)
    return before, seen()


@pytest.mark.parametrize("name", seen())
def test_nothing_of_torch_is_changed(name: str, before_and_behind: Any) -> None:
    before, behind = before_and_behind
    assert before[name] == behind[name]


def test_modules_beside_keep_their_class_and_attributes(before_and_behind: Any) -> None:
    layer = nn.Linear(2, 2)
    assert type(layer) is nn.Linear
    assert vars(layer).keys() == vars(nn.Linear(1, 1)).keys()
    layer.more = nn.Linear(1, 1)
    layer.weight = nn.Parameter(torch.ones(2, 2))
    assert type(layer.weight) is nn.Parameter
    assert layer.forward.__func__ is nn.Linear.forward  # type: ignore[attr-defined]


def test_a_patch_lasts_until_the_last_leaves_it() -> None:
    own = parametrize.register_parametrization
    with PARAMETRIZE.active():
        with PARAMETRIZE.active():
            assert parametrize.register_parametrization is not own
        assert parametrize.register_parametrization is not own
        with pytest.raises(ZeroDivisionError), PARAMETRIZE.active():
            raise ZeroDivisionError
        assert parametrize.register_parametrization is not own
    assert parametrize.register_parametrization is own


RELU, ACTIVATIONS = nn.ReLU(), {"gelu": nn.GELU()}


class OfGlobals(nn.Module):
    """Its activations are globals of this file, as `gelu` of `transformers.activations` is."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.gelu = RELU, ACTIVATIONS["gelu"]
        self.up, self.middle, self.down = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gelu(self.middle(self.relu(self.up(x)))))


def test_globals_of_a_models_code_stay_as_they_are() -> None:
    """Other models that call them are split, or not, as if there was no first one."""
    base, x = OfGlobals().double(), torch.randn(3, 8).double()
    plan = planning.plan(copy.deepcopy(base), tp=2, args=(x,))

    def work(mesh: Mesh) -> None:
        for _ in range(2):
            fresh = OfGlobals().double()
            fresh.load_state_dict(base.state_dict())
            split = shardwright.apply(fresh, plan, mesh)
            torch.testing.assert_close(split(x), base(x), rtol=0, atol=1e-9)
            assert fresh.relu is not RELU and fresh.gelu is not ACTIVATIONS["gelu"]

    run_ranks(2, work)
    assert (type(RELU), type(ACTIVATIONS["gelu"])) == (nn.ReLU, nn.GELU)
    assert vars(RELU).keys() == vars(nn.ReLU()).keys()
