"""Ranks that were not given the same stop when they load, apply or gather, and say what differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import ranks
from tests.faults.conftest import Start, all_well, errors

DIGEST = r"digest [0-9a-f]{12}"


def same(texts: list[str]) -> str:
    """The text that all ranks raised."""
    assert len(set(texts)) == 1, texts
    return texts[0]


@pytest.mark.parametrize(
    "other, name, values",
    [
        ({"dtype": torch.float64}, "dtype", "rank 0 has None, rank 1 has torch.float64"),
        ({"plan": "plan-train.json"}, "plan", "rank 0 has digest "),
        ({"model": "other"}, "weights", "rank 0 has digest "),
        (
            {"attn_implementation": "eager"},
            "model arguments",
            "rank 0 has {}, rank 1 has {'attn_implementation': 'eager'}",
        ),
    ],
)
def test_loading(folder: Path, start: Start, other: dict[str, Any], name: str, values: str) -> None:
    for key in other.keys() & {"plan", "model"}:
        other = {**other, key: str(folder / other[key])}
    ends = start(2, ranks.loads, str(folder / "model"), str(folder / "plan-2.json"), {1: other})
    text = same(errors(ends))
    assert text.startswith(f"DistributedError: the ranks do not have the same {name}: {values}")
    assert text.endswith(": give all ranks the same")


def test_plans_over_other_meshes(folder: Path, start: Start) -> None:
    """Their groups would be others, too."""
    other = {"plan": str(folder / "plan-mesh.json")}
    ends = start(4, ranks.loads, str(folder / "model"), str(folder / "plan-4.json"), {2: other})
    assert "do not have the same plan: rank 0 has digest" in same(errors(ends))


def test_a_checkpoint_that_one_rank_lacks(folder: Path, start: Start) -> None:
    other = {"model": str(folder / "nowhere")}
    ends = start(2, ranks.loads, str(folder / "model"), str(folder / "plan-2.json"), {1: other})
    first, second = errors(ends)
    assert first.startswith(f"CheckpointError: loading failed on rank 1: {folder}/nowhere does not")
    assert second.startswith(f"CheckpointError: {folder}/nowhere does not exist")


@pytest.mark.parametrize(
    "other, seeds, name", [("plan-train.json", {}, "plan"), ("plan-2.json", {1: 5}, "model")]
)
def test_applying(folder: Path, start: Start, other: str, seeds: dict[int, int], name: str) -> None:
    """Also a model whose weights were drawn with another seed."""
    ends = start(2, ranks.applies, folder / "model", folder / "plan-2.json", folder / other, seeds)
    text = same(errors(ends))
    assert text.startswith(f"DistributedError: the ranks do not have the same {name}: rank 0 has")


def test_gathering(folder: Path, start: Start) -> None:
    ends = start(2, ranks.gathers_other_names, folder / "model", folder / "plan-2.json")
    assert "the ranks do not have the same names: rank 0 has" in same(errors(ends))


@pytest.mark.parametrize(
    "work, args, text",
    [
        (
            ranks.runs,
            [(2, 9), (1, 9)],
            "rank 0 is at the argument 'argument 0' of the model [2, 9] int64 with values digest",
        ),
        (
            ranks.takes_another_way,
            None,
            "rank 0 is at the output of 'model.layers.1.input_layernorm' [1, 5, 64] float32, "
            "rank 1 is at the input 'input' of 'lm_head' [1, 5, 64] float32: give",
        ),
        (
            ranks.casts_its_model,
            None,
            "of 'model.embed_tokens' [1, 5, 64] float32, rank 1 is at the output of "
            "'model.embed_tokens' [1, 5, 64] float64: give",
        ),
    ],
)
def test_debugging_a_forward(
    folder: Path, start: Start, work: Callable[..., None], args: Any, text: str
) -> None:
    given = (folder / "model", folder / "plan-2.json", *([args] if args else []))
    ends = start(2, work, *given, environ=[{"SHARDWRIGHT_DEBUG": "1"}] * 2)
    assert text in same(errors(ends))


def test_debugging_what_is_alike(folder: Path, start: Start) -> None:
    """Also with a mesh dim whose ranks have batches of their own."""
    shapes = [(2, 9), (2, 9), (1, 7), (1, 7)]
    environ = [{"SHARDWRIGHT_DEBUG": "1"}] * 4
    ends = start(
        4, ranks.runs, folder / "model", folder / "plan-mesh.json", shapes, environ=environ
    )
    all_well(ends)
