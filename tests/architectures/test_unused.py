"""What the plain call of a model leaves unused is split too, and right when it is used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from benchmarks.compare import compare, predicted, reference
from benchmarks.zoo_case import build
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.marks import long
from tests.ranks import run_ranks

ENCODED, WIDTH = 23, 64


@pytest.mark.parametrize("name", ["bart", "trocr", long("prophetnet")])
def test_a_decoder_with_and_without_an_encoder(name: str) -> None:
    """Logits and all gradients, cross-attention's too; what is predicted is the plain call."""
    config, model = build("causal", name, torch.float64)
    plan = planning.plan(model, tp=2)
    assert not [w for w in plan.replicated if "does not use it" in w.reason]
    plain = zoo.inputs(name, config)
    generator = torch.Generator().manual_seed(5)
    encoded = torch.randn(2, ENCODED, WIDTH, generator=generator, dtype=torch.float64)
    for inputs in (plain, {**plain, "encoder_hidden_states": encoded}):
        expected = reference(model, inputs)
        assert expected.decode is not None
        assert expected.gradients is not None
        attends = {n for n in expected.gradients if "encoder_attn" in n or "cross_attn" in n}
        assert bool(attends) == ("encoder_hidden_states" in inputs)
        for found in run_ranks(
            2, lambda mesh, i=inputs, e=expected: compare(model, i, plan, mesh, e)
        ):
            assert found.logits <= 1e-9
            assert found.gradients is not None and found.gradients <= 1e-9, found.worst
            assert found.decode is not None and found.decode <= 1e-9
            assert found.split >= 0.9
            if inputs is plain:
                counted = {"forward": dict(found.forward), "backward": dict(found.backward)}
                assert predicted(plan) == counted


def called(model: Any, inputs: dict[str, Tensor], part: str) -> tuple[Tensor, dict[str, Tensor]]:
    """What `part` of a model gives for `inputs`, and its gradients by their names in the model."""
    output = model.get_submodule(part)(**inputs)
    found = output.logits if hasattr(output, "logits") else output
    values = (found if torch.is_tensor(found) else found.last_hidden_state).double()
    weights = torch.sin(torch.arange(values.numel(), dtype=torch.float64)).view(values.shape)
    (values * weights).sum().backward()
    return values.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(model: nn.Module, inputs: dict[str, Tensor], part: str, allowed: float) -> None:
    """`part` of the split model gives what it gives in the whole one, and has its gradients."""
    plan = planning.plan(model, tp=2)
    whole = copy.deepcopy(model)
    want, gradients = called(whole, inputs, part)

    def run(mesh: Mesh) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, mesh)  # type: ignore[arg-type]
        got, grads = called(local, inputs, part)
        assert (got - want).abs().max() <= allowed
        found = full_tensors(local, grads)
        assert found.keys() == gradients.keys()
        largest = max(float(g.abs().max()) for g in gradients.values())
        for name, g in gradients.items():
            assert (found[name] - g).abs().max() <= allowed * largest, name

    run_ranks(2, run)


def images(count: int, size: int) -> Tensor:
    """Made-up images."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)


def test_a_tower_by_itself_and_in_its_model() -> None:
    """A split gemma3 sees an image as the whole one does."""
    config, built = zoo.build("gemma3", attn="sdpa", mm_tokens_per_image=49)
    model = built.double()
    pixels = images(2, config.vision_config.image_size)
    assert_equal(model, {"pixel_values": pixels}, "model.vision_tower", 1e-9)
    marks = [config.image_token_id] * config.mm_tokens_per_image
    ids = torch.tensor([[5, 6, *marks, 7, 8, 9], [9, 5, *marks, 8, 7, 6]])
    inputs = {
        "input_ids": ids,
        "pixel_values": pixels,
        "token_type_ids": (ids == config.image_token_id).long(),
    }
    assert_equal(model, inputs, "", 1e-5)  # it casts to float32 within


@pytest.mark.long
def test_a_tower_that_runs_in_float32_alone() -> None:
    """gemma4's for sounds: planned in float64 too, in which it does not run."""
    _, model = build("causal", "gemma4", torch.float32)
    frames = torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(7))
    heard = torch.ones(2, 40, dtype=torch.bool)
    inputs = {"input_features": frames, "attention_mask": heard}
    assert_equal(model, inputs, "model.audio_tower", 1e-4)
    found = planning.plan(model.double(), tp=2)
    assert any("audio_tower" in name for name, m in found.modules.items() if m.parameters)


def test_a_tower_with_masks_of_counted_rows() -> None:
    """phi4's for sounds finds by `nonzero` which part of a stream each place is in."""
    _, model = build("causal", "phi4_multimodal", torch.float64)
    frames = torch.randn(2, 157, 80, generator=torch.Generator().manual_seed(7)).double()
    inputs = {"hidden_states": frames, "mask": torch.ones(2, 157, dtype=torch.bool)}
    assert_equal(model, inputs, "model.embed_tokens_extend.audio_embed.encoder", 1e-9)
