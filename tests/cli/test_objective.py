"""What was minimized, in the words of the commands."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.planner.contract.plan_file import Plan
from tests.cli.conftest import Run

ROOM = "least time within 2.0 MiB (saving 1 GiB is worth "


def test_plan_show_and_explain_say_it_in_a_line(run: Run, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = run("plan", small, "--tp", 2, "--objective", "time", "--memory", "2MiB", "-o", path)
    assert made.exit_code == 0, made.output
    for text in (made.stdout, run("show", path).stdout):
        assert any(" ".join(line.split()).startswith(f"objective {ROOM}")
                   for line in text.splitlines())  # fmt: skip
    told = " ".join(run("explain", path, "lm_head", small).stdout.split())
    assert f"because it is the cheapest: {ROOM}" in told
    found = Plan.load(path).objective
    assert (found.name, found.memory_bytes) == ("time", 2 * 2**20)
    assert found.byte_price_ns is not None and found.byte_price_ns > 0


def test_least_memory(run: Run, model: Path, planned: tuple[Path, object]) -> None:
    words = "least memory, or up to 5 % more if that is faster"
    assert words in " ".join(run("show", planned[0]).stdout.split())
    found = json.loads(
        run("explain", planned[0], "model.layers.*.mlp.up_proj", model, "--json").stdout
    )
    assert [one["objective"] for one in found] == [words]
