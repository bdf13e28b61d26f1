"""Calls with a mask for padding where like blocks are folded: in each they do what one shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run import dry_run
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.prepare import prepare
from shardwright.planner.prove.prover import Prover
from shardwright.runtime.api import apply
from tests import planning
from tests.planner.test_padding import Refuses, made
from tests.planner.test_unused import TOKENS, WIDTH, Config, is_split
from tests.ranks import run_ranks

IDS = torch.randint(0, TOKENS, (2, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
PLAIN = {"input_ids": torch.zeros(3, 19).long()}


class Block(nn.Module):
    """Where there is a mask it does what its `way` says."""

    def __init__(self, way: str, kind: int) -> None:
        super().__init__()
        self.way, self.kind, self.norm, self.act = way, kind, nn.LayerNorm(WIDTH), nn.ReLU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        h = self.up(self.norm(x)).relu()
        if mask is not None and self.way == "mixes":
            h = (h * mask.unsqueeze(-1)).cumsum(-1)
        if mask is not None and self.way == "gates":
            h = self.act(h * self.gate(x))
        if mask is not None and self.way == "inverts":
            h = h * (self.norm(x) @ torch.linalg.pinv(self.gate.weight))
        return x + self.down(h), h


class Stacked(nn.Module):
    """Blocks of these kinds; with a mask it may read what number `afar` had inside."""

    main_input_name = "input_ids"

    def __init__(self, way: str = "", kinds: str = "0000", afar: int | None = None) -> None:
        super().__init__()
        self.config, self.afar = Config(hidden_size=WIDTH), afar
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList(Block(way, int(kind)) for kind in kinds)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, inside = self.embed(input_ids), []
        for layer in self.layers:
            x, h = layer(x, attention_mask)
            inside.append(h)
        if attention_mask is not None and self.afar is not None:
            x = x + inside[self.afar].sum(-1, keepdim=True) * attention_mask.unsqueeze(-1)
        return self.head(x)


def assert_equal(model: nn.Module, plan: Plan) -> None:
    """With a mask and without."""
    want = [model(IDS), model(IDS, MASK)]

    def run(mesh: Any) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip([local(IDS), local(IDS, MASK)], want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)

    run_ranks(2, run)


@pytest.mark.parametrize("way", ["mixes", "gates"])
def test_every_block_is_right(way: str) -> None:
    model = made(lambda: Stacked(way))
    task = prepare(model, 2)
    assert len(task.folding.stacks) == 1 and task.unfolded.graph is not task.graph
    plan = planning.plan(model, 2)
    assert is_split(plan, "layers.3.up.weight") and is_split(plan, "layers.3.down.weight")
    assert_equal(model, plan)
    assert Prover(model).prove(plan).plan == plan


@pytest.mark.parametrize(("kinds", "afar"), [("010010", -2), ("001001", -3)])
def test_blocks_that_are_read_from_afar_are_not_folded(kinds: str, afar: int) -> None:
    """Also where only the call with a mask reads them: in a shortened stack it reads another."""
    model = made(lambda: Stacked("", kinds, afar))
    assert_equal(model, planning.plan(model, 2))


def test_what_only_such_calls_read_is_split_and_averaged() -> None:
    """The plan has what such a call needs, but its price is that of the plain call."""
    model = made(lambda: Stacked("gates"))
    mesh = {"dp": 2, "tp": 2}
    plan = planning.plan(model, mesh=mesh, phase="train")
    assert is_split(plan, "layers.2.gate.weight")
    plain = planning.plan(model, mesh=mesh, phase="train", kwargs=PLAIN)
    assert plan.predicted.time_ns == plain.predicted.time_ns
    assert plan.predicted.collectives == plain.predicted.collectives


def test_nothing_changes_its_placement_for_them_without_need() -> None:
    plan = planning.plan(made(lambda: Stacked("gates")), 2)
    assert not any(m.changes for name, m in plan.modules.items() if name.endswith(".act"))


def test_ops_without_a_rule_in_them_are_named() -> None:
    plan = planning.plan(made(lambda: Stacked("inverts")), 2)
    assert plan.opaque == {"linalg_pinv": 4}
    reasons = {w.parameter: w.reason for w in plan.replicated}
    assert "linalg_pinv in 'layers." in reasons["layers.2.gate.weight"]


def test_what_fails_with_the_traced_blocks_alone_is_not_split(monkeypatch: Any) -> None:
    """They are tried beside the whole model, and what fails there is forbidden in all of them."""
    run_local, failed = dry_run.run_local, []

    def fails(root: Any, runs: Any, plan: Plan, *others: Any) -> Mismatch | None:
        if len(root.layers) < 4 and is_split(plan, "layers.0.up.weight"):
            failed.append(len(runs))
            return Mismatch("layers.0.up", "made to fail")
        return run_local(root, runs, plan, *others)

    monkeypatch.setattr(dry_run, "run_local", fails)
    plan = planning.plan(made(lambda: Stacked("gates")), 2)
    assert failed and set(failed) == {2}
    assert not any(is_split(plan, f"layers.{i}.up.weight") for i in range(4))


def test_a_plan_that_says_nothing_of_them_can_be_checked() -> None:
    """One whose calls with a mask cannot be traced holds for the others."""
    model = made(Refuses)
    assert Prover(model).prove(planning.plan(model, 2)).shapes > 0
