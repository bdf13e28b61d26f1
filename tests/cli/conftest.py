"""Tiny models and their plans, made once for the whole folder, and the command line in-process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from click.testing import CliRunner, Result
from transformers import LlamaConfig, PreTrainedConfig

from shardwright.planner.cli.main import main
from shardwright.planner.contract.plan_file import Plan

Run = Callable[..., Result]


def tiny(**changes: object) -> PreTrainedConfig:
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def run() -> Run:
    """`run("plan", model, "--tp", 2)`; an exception that is no ShardwrightError is raised again.

    Plans are for least memory, so that small models are split, where nothing else is said.
    """

    def invoke(*arguments: object) -> Result:
        if arguments[:1] == ("plan",) and "--objective" not in arguments:
            arguments = (*arguments, "--objective", "memory")
        return CliRunner().invoke(
            main, [str(a) for a in arguments], prog_name="shardwright", catch_exceptions=False
        )

    return invoke


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config and no weights."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config of a model of one layer, which takes less time to plan."""
    directory = tmp_path_factory.mktemp("models") / "small"
    tiny(num_hidden_layers=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def planned(model: Path, run: Run) -> tuple[Path, Result]:
    """A plan file for two ranks, and what the command that wrote it printed."""
    path = model.parent / "plan.json"
    result = run("plan", model, "--tp", 2, "-o", path)
    assert result.exit_code == 0, result.output
    return path, result


@pytest.fixture
def damaged(planned: tuple[Path, Result], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the plan file with some keys changed."""

    def change(**keys: object) -> Path:
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps({**json.loads(planned[0].read_text()), **keys}))
        return path

    return change


@pytest.fixture
def plan(planned: tuple[Path, Result]) -> Plan:
    return Plan.load(planned[0])
