"""What a plan leaves behind: nothing that the cyclic garbage collector would have to find."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from shardwright.planner.graph.graph import Graph
from shardwright.planner.search.meshes import Cluster
from shardwright.planner.search.solution import Solution
from shardwright.planner.trace.record.record import Record
from tests import planning
from tests.planner.mlps import WIDTH, Mlp

LARGE = (Graph, Record, Solution, torch.nn.Linear)

LLAMA: Any = LlamaConfig(
    num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=4,
    vocab_size=32, architectures=["LlamaForCausalLM"],
)  # fmt: skip
TRAINING: dict[str, Any] = {"phase": "train", "recompute": True}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (Mlp(), {"tp": 2, "args": torch.zeros(3, WIDTH)}),
        (LLAMA, {"tp": 2}),
        (LLAMA, {"tp": 2, **TRAINING}),
        (LLAMA, {"cluster": Cluster(hosts=2, gpus_per_host=2), **TRAINING}),
    ],
    ids=["mlp", "llama", "training", "cluster"],
)
def test_all_but_the_plan_is_freed_at_once(model: Any, how: dict[str, Any]) -> None:
    """A cycle with the graph in it takes the collector as long as a tenth of a plan."""
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        planning.proven(model, **how)
        assert _alive() == before
    finally:
        gc.enable()


def _alive() -> list[int]:
    return [sum(isinstance(x, kind) for x in gc.get_objects()) for kind in LARGE]
