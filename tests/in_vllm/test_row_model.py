"""Split models with requests in one row, as vLLM calls them; ranks as threads, without vLLM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    MistralConfig,
    OPTConfig,
    StableLmConfig,
)

import shardwright
from benchmarks.vllm_rows import LONGEST, followed, generated
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.in_vllm.row_model import RowModel
from tests import planning
from tests.marks import long
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 48,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "passes nothing on to attention": lambda: StableLmConfig(**SIZES, num_key_value_heads=2),
    "a window": lambda: MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4),
    "calls the decoder of its base model": lambda: OPTConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, ffn_dim=48,
        word_embed_proj_dim=32,
    ),
    "narrow values": lambda: DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=2,
    ),
}  # fmt: skip


def made(config: Any) -> Any:
    """A model with weights large enough that attention matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def on_ranks(model: Any, ranks: int, fn: Callable[[RowModel], Any]) -> list[Any]:
    """Return what `fn` gives on each rank."""
    plan = planning.plan(model, tp=ranks)

    def work(mesh: Mesh) -> Any:
        split = shardwright.apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            return fn(RowModel(split, copy.deepcopy(model).to("meta"), LONGEST))

    return run_ranks(ranks, work)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("passes nothing on to attention", 2),
        ("a window", 3),
        long("a window", 2),
        ("calls the decoder of its base model", 2),
        long("narrow values", 2),
    ],
)
def test_tokens_are_those_of_the_unsplit_model(name: str, ranks: int) -> None:
    model = made(CONFIGS[name]())
    with torch.no_grad():
        want = followed(model)
    assert on_ranks(model, ranks, generated) == [want] * ranks


def test_what_layers_ask_is_that_of_a_rank() -> None:
    [one, _] = on_ranks(made(CONFIGS["a window"]()), 2, lambda model: model.layers)
    assert {*one} == {0, 1}
    asked = one[0]
    assert (asked.heads, asked.key_heads, asked.width, asked.window) == (2, 1, 8, 4)
    assert asked.scale == pytest.approx(8**-0.5)


def test_attention_is_transformers_own_again() -> None:
    """`intercept` stays; without an engine it changes nothing."""
    model = made(CONFIGS["a window"]())
    tokens = torch.arange(9)[None]
    before = model(input_ids=tokens).logits
    on_ranks(model, 2, lambda _: None)
    assert torch.equal(model(input_ids=tokens).logits, before)


class Shifted(nn.Module):
    """Adds to each token what the token before it has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return self.inner(x) + self.inner(before)


def _shifted() -> Any:
    model = made(CONFIGS["passes nothing on to attention"]())
    model.model.layers[0].mlp.up_proj = Shifted(model.model.layers[0].mlp.up_proj)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: made(Gemma2Config(**SIZES, num_key_value_heads=4, head_dim=8)), "has 'eager'"),
        (
            lambda: made(FalconConfig(**{k: v for k, v in SIZES.items() if k[0] != "i"})),
            "attention interface",
        ),
        (_shifted, "mixes tokens outside of attention"),
        (lambda: made(BertConfig(**SIZES)), "neither causal nor"),
    ],
    ids=["eager", "its own attention", "token shift", "both directions"],
)
def test_what_vllm_would_compute_otherwise_is_refused(model: Callable[[], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        on_ranks(model(), 2, lambda _: None)
