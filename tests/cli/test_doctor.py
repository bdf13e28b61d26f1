"""`shardwright doctor`: what is split, what stays whole, and which calls a split model takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from shardwright.planner.contract.plan_file import Replicated
from shardwright.planner.report.doctor import (
    TESTED,
    Diagnosis,
    OnRanks,
    diagnose,
    doctor_report,
)
from shardwright.planner.report.tables import plain
from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent


class Model(nn.Module):
    """An MLP, and a module whose code asks data for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scaled = Scaled()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.down(self.up(x).relu())
        return self.scaled(x if mask is None else x * mask)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x) * max(x.flatten().tolist())


def test_a_model_that_runs(run: Run, small: Path) -> None:
    found = json.loads(run("doctor", small, "--tp", 2, "--tp", 4, "--json").stdout)
    assert found["architecture"] == "LlamaForCausalLM"
    assert [(row["tp"], row["fits"]) for row in found["ranks"]] == [(2, True), (4, True)]
    assert all(row["share"] < 1 / row["tp"] + 0.02 for row in found["ranks"])
    assert found["whole"] == found["ranks"][1]["whole"] == found["opaque"] == found["refused"] == []
    assert any("filled the cache" in call for call in found["proven"])
    assert found["versions"].keys() == TESTED.keys()


def test_it_is_printed(run: Run, small: Path) -> None:
    text = run("doctor", small, "--tp", 2).stdout
    assert text.startswith("LlamaForCausalLM: ")
    assert "No large parameter stays replicated." in text
    assert "input_ids, use_cache=False" in text


def test_calls_of_a_model_without_a_cache() -> None:
    """No call of it fills one, so none comes after such a call, and none is refused for that."""
    sizes: Any = {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1
    }  # fmt: skip
    found = diagnose(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)), (2,))
    assert any("inputs_embeds" in call for call in found.proven) and found.refused == []
    assert not any("filled" in call for call in found.proven)


def test_what_stays_whole_is_named() -> None:
    found = diagnose(Model(), (2,), args=torch.zeros(3, 19, 16))
    assert found.opaque == ["scaled"]
    assert "scaled: stay replicated" in plain(doctor_report(found))
    assert found.ranks[0].share > 0.5


def test_what_stays_whole_is_said_of_its_number_of_ranks() -> None:
    whole = [Replicated(parameter="a.weight", bytes=64, reason="why not")]
    rows = [OnRanks(2, whole=whole), OnRanks(3, why="no plan"), OnRanks(4), OnRanks(8, whole=whole)]
    words = plain(doctor_report(Diagnosis("Model", 9, "float32", {}, rows)))
    assert " ".join(words.split()).endswith(
        "On 2 and 8 ranks: LARGE_AND_REPLICATED BYTES REASON a.weight 64 B why not "
        "On 4 ranks: No large parameter stays replicated. CALL SPLIT_MODEL"
    )
    none = plain(doctor_report(Diagnosis("Model", 9, "float32", {}, [OnRanks(3, why="no plan")])))
    assert "stays replicated" not in none


def test_an_unknown_device_is_refused(run: Run, small: Path) -> None:
    result = run("doctor", small, "--tp", 2, "--device", "l5")
    assert result.exit_code == 2 and "l5" in result.stderr


@pytest.mark.parametrize("name", TESTED)
def test_tested_versions_are_those_of_development(name: str) -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert any(pin == f"{name}=={TESTED[name]}" for pin in pins)
