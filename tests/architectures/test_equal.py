"""Every architecture of the first milestone, split over two thread ranks, equals the whole model.

`python -m benchmarks.zoo` does the same on real gloo processes, and for more of them.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.compare import compare, predicted, reference
from benchmarks.zoo import FIRST
from benchmarks.zoo_case import build
from tests import planning, zoo
from tests.marks import long
from tests.ranks import run_ranks

PEER = {
    # Collectives of one forward of the same model under transformers 5.23's own plan at tp=2, as
    # counted by torch's CommDebugMode; architectures that have no plan there are not listed.
    "cohere": 6, "gemma2": 6, "gpt_neox": 5, "llama": 6, "mistral": 6, "olmo2": 12, "phi3": 10,
    "qwen2": 6, "qwen3": 6, "starcoder2": 6,
}  # fmt: skip
SIX = {"llama", "phi3", "gpt2"}
ALIKE = {"mistral", "qwen2", "qwen3", "starcoder2", "stablelm", "opt", "roberta"}
"""They resemble others."""
CASES = [
    long(kind, name) if name in ALIKE else (kind, name) for kind, n in FIRST.items() for name in n
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equal_in_float64(kind: str, name: str) -> None:
    """Logits, gradients and a decode step within 1e-9; block weights split; few collectives."""
    config, model = build(kind, name, torch.float64)
    inputs = zoo.inputs(name, config, kind=kind)
    plan = planning.plan(model, tp=2)
    expected = reference(model, inputs)
    for found in run_ranks(2, lambda mesh: compare(model, inputs, plan, mesh, expected)):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert found.decode is None or found.decode <= 1e-9
        assert found.split >= 0.9
        forward = sum(found.forward.values())
        assert forward <= PEER.get(name, forward)
        assert name not in SIX or forward == 6
        assert predicted(plan) == {"forward": dict(found.forward), "backward": dict(found.backward)}


@pytest.mark.parametrize("name", ["cohere", "gpt_neox"])
def test_parallel_attention_and_mlp_share_an_all_reduce(name: str) -> None:
    """Where a layer adds attention and MLP to the residual at once, one all-reduce does."""
    counts = []
    for layers in (1, 2):
        _, model = zoo.build(name, num_hidden_layers=layers, attn="sdpa")
        plan = planning.plan(model, tp=2)
        counts.append(sum(c.count for c in plan.predicted.collectives if c.phase == "forward"))
    assert counts[1] - counts[0] == 1


def test_two_collectives_backward_per_layer() -> None:
    """A dense layer takes two all-reduces backward, not one for each of q, k, v, gate and up."""
    counts = []
    for layers in (1, 2):
        _, model = zoo.build("llama", num_hidden_layers=layers, attn="sdpa")
        plan = planning.plan(model, tp=2)
        counts.append(sum(c.count for c in plan.predicted.collectives if c.phase == "backward"))
    assert counts[1] - counts[0] == 2
