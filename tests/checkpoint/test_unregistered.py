"""Tensors that no checkpoint has: parameters in plain lists, and numbers that ranks draw."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from shardwright.errors import DistributedError, ModelError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply, load
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import empty_model
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import copy_number, run_ranks

WIDTH = 16


class KeepsConfig(PreTrainedConfig):
    model_type = "keeps"

    def __init__(self, what: str = "", **more: Any) -> None:
        self.what = what
        super().__init__(**more)


class Keeps(PreTrainedModel):
    """Two layers, and a factor or a module that it keeps in one of many ways."""

    config_class = KeepsConfig
    main_input_name = "x"

    def __init__(self, config: KeepsConfig) -> None:
        super().__init__(config)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        drawn = torch.randn(WIDTH)
        kept: list[Any] = []
        match config.what:
            case "buffer":
                self.register_buffer("factor", drawn, persistent=False)
            case "statistics":
                self.register_buffer("factor", drawn)
            case "tensor":
                self.factor = drawn
            case "tensors":
                kept = [{"of": drawn}]
            case "parameters":
                kept = [(nn.Parameter(drawn.double()),)]
            case "modules":
                kept = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
            case "between":
                kept = [nn.Linear(2 * WIDTH, 2 * WIDTH)]
            case "leaf":
                self.factor = torch.randn(2 * WIDTH, dtype=torch.float64, requires_grad=True)
            case "registered":
                kept = [self.down]
        self.kept = kept
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.what == "between":
            return self.down(self.kept[0](self.up(x)).relu())
        if self.config.what == "leaf":
            return self.down((self.up(x) * self.factor).relu())
        x = self.down(self.up(x).relu())
        if not self.kept:
            return x * self.factor
        (kept,) = self.kept
        if self.config.what == "registered":
            return kept(self.up(x))
        if isinstance(kept, nn.Module):
            return kept(x)
        return x * (kept["of"] if isinstance(kept, dict) else kept[0])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is one of transformers'."""
    AutoConfig.register("keeps", KeepsConfig, exist_ok=True)
    monkeypatch.setattr(sys.modules["transformers"], "Keeps", Keeps, raising=False)


def made(what: str, seed: int = 0) -> Keeps:
    torch.manual_seed(seed)
    model = Keeps(KeepsConfig(what)).double().eval()
    for module in model.kept:
        if isinstance(module, nn.Module):
            module.double()
    return model


def inputs(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def plan_of(model: Any, dp: int = 1) -> Plan:
    mesh = {"dp": dp, "tp": 2} if dp > 1 else {"tp": 2}
    return planning.plan(model, mesh=mesh, args=(inputs(3, 19),))


@pytest.mark.parametrize("what, of", [("parameters", "kept.0.0"), ("modules", "kept.0.0.weight")])
def test_parameters_in_a_plain_list_are_in_no_checkpoint(
    what: str, of: str, tmp_path: Path
) -> None:
    """They are refused wherever a model is built from its config; else ranks would draw them."""
    made(what).save_pretrained(tmp_path)
    message = f"a Keeps keeps parameters in 'kept', .* no checkpoint has '{of}'. Make it an nn."
    with pytest.raises(ModelError, match=message):
        plan_of(tmp_path)
    with pytest.raises(ModelError, match=message):
        empty_model(Keeps, KeepsConfig(what))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("what", ["parameters", "modules", "between", "leaf", "registered"])
def test_a_module_at_hand_keeps_what_it_has(what: str, dp: int) -> None:
    """Outputs and gradients are those of the unsplit model, of parameters in lists as well."""
    model, x = made(what), inputs(2, 7)

    def step(
        local: nn.Module, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        output = local(rows)
        (output**2).mean().backward()
        held: Any = local
        (kept,) = held.kept or [[held.factor]]
        apart = kept.parameters() if isinstance(kept, nn.Module) else kept
        grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        own = [] if what == "registered" else [p.grad for p in apart]
        return output.detach(), grads, own

    plan = plan_of(model, dp)
    want = step(copy.deepcopy(model), x)

    def run(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None], Tensor]:
        local = apply(copy.deepcopy(model), plan, mesh)
        rows = torch.arange(2).chunk(dp)[copy_number(mesh)]
        output, grads, own = step(local, x[rows])
        return output, full_tensors(local, grads), own, rows

    for output, grads, own, rows in run_ranks(2 * dp, run, plan.mesh):
        torch.testing.assert_close(output, want[0][rows], rtol=0, atol=1e-9)
        torch.testing.assert_close(grads, want[1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own, want[2], rtol=1e-9, atol=1e-9)


DRAWING = threading.Lock()


@pytest.mark.parametrize("what", ["buffer", "statistics", "tensor", "tensors", "modules"])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_ranks_draw_the_same(what: str, seeds: tuple[int, int]) -> None:
    """Buffers and attributes that code draws are compared, as weights are."""
    weights = {n: p.detach() for n, p in made(what).named_parameters()}
    plan = plan_of(made(what))

    def run(mesh: Mesh) -> Tensor:
        with DRAWING:  # threads share a generator
            model = made(what, seeds[mesh["tp"].rank])
            model.load_state_dict(weights, strict=False)
        return apply(model, plan, mesh)(torch.ones(1, 5, WIDTH, dtype=torch.float64)).detach()

    if seeds[0] == seeds[1]:
        first, second = run_ranks(2, run)
        assert torch.equal(first, second)
        return
    message = r"ranks 0 and 1 have different numbers in '(factor|kept\.)"
    with pytest.raises(DistributedError, match=message):
        run_ranks(2, run)


def test_a_buffer_that_ranks_draw_when_they_load(tmp_path: Path) -> None:
    model = made("buffer")
    model.save_pretrained(tmp_path)
    plan = plan_of(tmp_path)

    with pytest.raises(DistributedError, match="different numbers in 'factor'"):
        run_ranks(
            2, lambda mesh: load(tmp_path, plan, mesh=cast(Any, mesh))
        )  # threads share a generator
