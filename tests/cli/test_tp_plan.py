"""Tensor-parallel plans of transformers on the command line."""

import json
from pathlib import Path

import shardwright
from tests.cli.conftest import Run


def test_both_side_by_side(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 2, "--compare-tp-plan")
    assert result.exit_code == 0, result.stderr
    words = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "SHARDWRIGHT TP_PLAN (9 rules)" in words
    assert "memory per rank 209.3 KiB (50.2%) 209.3 KiB (50.2%)" in words
    assert any(w.startswith("backward all-reduce 5 (640.0 KiB) 11 (1.4 MiB)") for w in words)
    assert words[-1].startswith(
        "The tp_plan leaves nothing large replicated: 1.2 KiB in parameters"
    )
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_plan_from_a_file_and_what_it_replicates(run: Run, model: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "table.json", tmp_path / "plan.json"
    table.write_text('{"lm_head": "colwise_rep", "model.embed_tokens": "embedding_rowwise"}')
    options = ["--compare-tp-plan", "--tp-plan", table, "--pins-from-tp-plan"]
    result = run("plan", model, "--tp", 2, *options, "-o", out)
    assert result.exit_code == 0, result.stderr
    words = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "REPLICATED_BY_TP_PLAN BYTES SHARDWRIGHT" in words
    assert "model.layers.*.mlp.up_proj.weight 64.0 KiB column 128@tp" in words
    want = {"model.embed_tokens.weight": "shard:0", "lm_head.weight": "shard:0"}
    assert shardwright.Plan.load(out).pins == want


def test_as_json(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 4, "--compare-tp-plan", "--json")
    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert shardwright.Plan.from_json(json.dumps(found["plan"])).mesh == {"tp": 4}
    hand = found["tp_plan"]
    assert (hand["rules"], hand["unused"], hand["predicted"]) == (9, [], None)
    assert "cannot be split by style 'colwise'" in hand["problem"]


def test_options_that_need_each_other(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 2, "--tp-plan", "x.json")
    assert result.exit_code == 2
    assert "--tp-plan needs --compare-tp-plan or --pins-from-tp-plan" in result.stderr
    assert run("plan", small, "--tp", 2, "-q", "--compare-tp-plan").exit_code == 2
