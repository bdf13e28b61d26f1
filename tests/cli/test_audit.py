"""`shardwright audit transformers`: its rows, and its exit code."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from transformers import PreTrainedConfig

from shardwright.planner.hand_written.subjects import with_few_experts
from tests.cli.conftest import Run


def test_a_right_table_beside_our_plan(run: Run) -> None:
    result = run("audit", "transformers", "llama")
    assert result.exit_code == 0, result.stderr
    words = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert words[0] == "TYPE TABLE RULES VERDICT TIME BYTES FP8_CUTS FIRST_FAULT"
    assert words[1].startswith("llama tp 9 right 1.0") and words[1].endswith("x 0")
    assert "tp=2: 1 right." in words[3]


def test_a_wrong_table_as_json(run: Run) -> None:
    result = run("audit", "transformers", "apertus", "--json")
    assert result.exit_code == 1
    assert "1 of 1 tables are wrong on 2 ranks" in result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["name"], row["verdict"], row["time"]) == ("apertus", "wrong in training", None)
    assert row["fault"]["op"] == "mul" and row["fault"]["module"] == "model.layers.0.mlp.act_fn"
    assert row["fault"]["where"].startswith("activations.py:")


def test_small_models_fit_together(run: Run) -> None:
    """Sections of rotary angles must fit a head; one default config says no width of heads."""
    result = run("audit", "transformers", "qwen2_vl_text", "ministral", "--json")
    assert result.exit_code == 0, result.stderr
    assert [row["verdict"] for row in json.loads(result.stdout)["rows"]] == ["right", "right"]


def test_types_without_a_table_are_refused(run: Run) -> None:
    result = run("audit", "transformers", "llamma")
    assert result.exit_code == 2
    assert "transformers has no table for 'llamma'; did you mean llama" in result.stderr


@pytest.mark.parametrize(
    ("have", "ranks", "want"),
    [
        ({"num_experts": 256, "num_experts_per_tok": 8}, 2, {"num_experts": 16}),
        ({"n_routed_experts": 288, "num_experts_per_tok": 8}, 2, {"n_routed_experts": 18}),
        ({"n_routed_experts": 288, "num_experts_per_tok": 8}, 4, {"n_routed_experts": 36}),
        (
            {"n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12}, 2,
            {"n_routed_experts": 64, "zero_expert_num": 32},
        ),
        ({"num_experts": 7}, 2, {"num_experts": 7}),
    ],
)  # fmt: skip
def test_fewer_experts_say_the_same_of_a_table(
    have: dict[str, int], ranks: int, want: dict[str, int]
) -> None:
    config = PreTrainedConfig(**cast("dict[str, Any]", have))
    assert vars(with_few_experts(config, ranks)).items() >= want.items()
    assert vars(config).items() >= have.items()
