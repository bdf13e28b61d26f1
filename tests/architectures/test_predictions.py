"""What a plan predicts of the workload that it states is what a run of that workload takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.compare import weighing_loss
from benchmarks.zoo import FIRST
from benchmarks.zoo_case import build
from shardwright.runtime.api import apply
from shardwright.runtime.communication.audit import count_collectives
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo
from tests.marks import sampled
from tests.predicted import Tally, counted, held, predicted
from tests.ranks import run_ranks

KINDS = {name: kind for kind, names in FIRST.items() for name in names}
TWO = (
    "llama gemma2 phi3 gpt2 gpt_neox opt bloom falcon starcoder2 cohere mixtral bert t5".split()
)  # on 2 ranks
CASES = [*((name, 2) for name in TWO), ("qwen3", 4), ("olmo2", 3)]
"""Three ranks share 128 rows unevenly."""
ALIKE = [(name, 2) for name in ("bloom", "cohere", "falcon", "gpt_neox", "opt", "starcoder2")]
BATCH, SEQ = 2, 11  # not the sizes of the trace


@pytest.mark.parametrize(("name", "tp"), sampled(CASES, ALIKE))
def test_predictions_are_exact(name: str, tp: int) -> None:
    kind = KINDS.get(name, "causal")
    config, model = build(kind, name, torch.float32)
    assert_exact(model, zoo.inputs(name, config, batch=BATCH, seq=SEQ, kind=kind), tp)


def test_predictions_of_folded_blocks_are_exact() -> None:
    """Blocks that are traced once are run, and so predicted, as often as they stand there."""
    config, model = zoo.build("llama", attn="sdpa", num_hidden_layers=5)
    assert_exact(model, zoo.inputs("llama", config, batch=BATCH, seq=SEQ), 2)


def assert_exact(model: torch.nn.Module, inputs: dict[str, Any], tp: int) -> None:
    """Collectives by kind and phase, the bytes that enter them, and bytes held, on every rank."""
    plan = planning.plan(model, tp, batch=BATCH, seq=SEQ)
    assert plan.predicted.collectives

    def rank(mesh: Mesh) -> tuple[Any, Tally, Tally]:
        local = apply(copy.deepcopy(model), plan, mesh)
        with count_collectives() as ahead:
            output = local(**inputs)
        with count_collectives() as back:
            weighing_loss(output).backward()
        return held(local), counted(ahead), counted(back)

    wanted = predicted(plan, "forward"), predicted(plan, "backward")
    found = run_ranks(tp, rank)
    assert [bytes_held for bytes_held, *_ in found] == plan.predicted.parameter_bytes
    assert [tuple(tallies) for _, *tallies in found] == [wanted] * tp
