"""Mixtures of which only the first experts have parameters: ranks have other rows, or none."""

from __future__ import annotations

import copy
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.architectures.test_expert_parallel import ROUNDED, assert_equal_to_one_process, built
from tests.marks import long
from tests.ranks import run_ranks

WIDTH, INNER, FIRST, EXPERTS, CHOSEN = 32, 16, 4, 6, 3
STEPS = 4
MESHES = [{"ep": 2, "tp": 1}, {"ep": 4, "tp": 1}, {"ep": 2, "tp": 2}]


class FirstExperts(nn.Module):
    """Each expert has a scale, the first ones matrices, and the others give tokens as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.all = FIRST, EXPERTS
        self.up = nn.Parameter(torch.randn(FIRST, INNER, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(FIRST, WIDTH, INNER) / 4)
        self.scale = nn.Parameter(torch.rand(EXPERTS) + 0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.all):
            token, at = torch.where(chosen == expert)
            if len(token):
                made = x[token]
                if expert < self.first:
                    made = F.linear(F.silu(F.linear(made, self.up[expert])), self.down[expert])
                made = made * self.scale[expert] * weights[token, at, None]
                out = out.index_add(0, token, made)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = FirstExperts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        return x + self.experts(rows, chosen, weights).view(x.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    (out * torch.sin(torch.arange(out[0].numel()).view(out[0].shape))).sum((1, 2)).mean().backward()
    optimizer.step()
    return out.detach()


@pytest.mark.parametrize("mesh", [long(MESHES[0]), *MESHES[1:]])
def test_training_is_that_of_one_process(mesh: dict[str, int]) -> None:
    """Outputs of each step, the first gradients, and all parameters after the last step."""
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(4, 7, WIDTH, dtype=torch.float64)
    plan = planning.plan(model, mesh=mesh, args=(x,), phase="train", batch=4)
    entry = plan.modules["blocks.*.experts"]
    rows = {2: "4@ep:3:1", 4: "4@ep:2:2:0:0"}[mesh["ep"]]
    assert entry.attributes["first"] == rows and entry.attributes["all"] == "6@ep"
    assert entry.parameters["up"].placement.startswith(rows)
    assert entry.parameters["scale"].placement == "6@ep"

    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    want = [stepped(whole, optimizer, x)]
    gradients = {n: p.grad.clone() for n, p in whole.named_parameters() if p.grad is not None}
    want += [stepped(whole, optimizer, x) for _ in range(STEPS)]

    def work(at: Mesh) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, at)
        mixture: Any = local.get_submodule("blocks.0.experts")
        first = int(rows.split(":")[1 + at["ep"].rank])
        assert len(mixture.up.to_local()) == len(mixture.down.to_local()) == first
        optimizer = torch.optim.AdamW(local.parameters(), lr=1e-2)
        part = x.chunk(mesh["ep"])[at["ep"].rank]
        for step in range(STEPS + 1):
            found = stepped(local, optimizer, part)
            expected = want[step].chunk(mesh["ep"])[at["ep"].rank]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            if not step:
                grads = full_tensors(local, {n: p.grad for n, p in local.named_parameters()})
                torch.testing.assert_close(grads, gradients, rtol=0, atol=1e-9)
        after = full_tensors(local, dict(local.named_parameters()))
        for name, value in whole.named_parameters():
            torch.testing.assert_close(after[name], value.detach(), rtol=0, atol=1e-9)

    run_ranks(prod(mesh.values()), work, mesh)


@pytest.mark.parametrize("mesh", [MESHES[2], *map(long, MESHES[:2])])
def test_code_that_fails_with_one_expert_for_each_token(mesh: dict[str, int]) -> None:
    """Its tokens come with their expert twice, the second time with weight 0."""
    assert_equal_to_one_process(built("longcat_flash"), mesh, ROUNDED)


def test_checkpoints(tmp_path: Path) -> None:
    """Ranks read their rows, or none, and save what was read."""
    model: Any = zoo.build("longcat_flash")[1]
    model.save_pretrained(tmp_path / "model")
    mesh = {"ep": 4, "tp": 1}
    plan = planning.plan(str(tmp_path / "model"), mesh=mesh, batch=4)
    assert {m.dispatch.columns for m in plan.modules.values() if m.dispatch} == {2}

    def work(at: Mesh) -> None:
        local: Any = shardwright.load(tmp_path / "model", plan, mesh=at.device_mesh)
        assert local.shardwright_report.held <= max(plan.predicted.parameter_bytes)
        shardwright.save(local, tmp_path / "saved")

    run_ranks(4, work, mesh)
    again = type(model).from_pretrained(tmp_path / "saved")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
