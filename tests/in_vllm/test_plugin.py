"""The plugin and the class of planned models, with a stand-in for vLLM; vLLM itself where it is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.in_vllm import plugin
from shardwright.runtime.in_vllm.model import PlannedForCausalLM
from tests import planning
from tests.ranks import run_ranks
from tests.six_heads import llama

RANKS = 4
"""Of which two have two query heads each, and two have one."""


class Attention(nn.Module):
    """Takes what vLLM's layer takes, and attends within one request, without a cache."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *, num_kv_heads: int,
        cache_config: Any, per_layer_sliding_window: int | None, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.num_kv_heads, self.width = num_heads, num_kv_heads, head_size
        self.scale, self.prefix = scale, prefix
        assert cache_config.sliding_window is per_layer_sliding_window is None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (
            x.view(len(x), n, self.width).transpose(0, 1)
            for x, n in zip((query, key, value), sizes, strict=True)
        )
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 0) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(0, 1).flatten(1)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is registered with a stand-in for vLLM."""
    models: dict[str, str] = {}

    def ranks() -> Any:
        return SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD)

    parts: dict[str, Any] = {
        "vllm": {"ModelRegistry": SimpleNamespace(register_model=models.__setitem__)},
        "vllm.distributed": {"get_tp_group": ranks},
        "vllm.model_executor.layers.attention": {"Attention": Attention},
    }
    for name in ("vllm.model_executor", "vllm.model_executor.layers", *parts):
        module = ModuleType(name)
        vars(module).update(parts.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return models


def settings(folder: Path, **changes: Any) -> Any:
    """vLLM's settings for a model."""
    given: dict[str, Any] = {
        "model_config": SimpleNamespace(
            model=str(folder), dtype=torch.float64, max_model_len=32, trust_remote_code=False,
            revision=None, hf_overrides={},
        ),
        "device_config": SimpleNamespace(device=torch.device("cpu")),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(sliding_window=7),
        "lora_config": None,
        "quant_config": None,
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path, Plan]:
    """A model, the folder where it is, and its plan, which the environment names."""
    torch.manual_seed(0)
    model = llama(num_key_value_heads=6).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "model")
    plan = planning.plan(model, tp=RANKS)
    plan.save(tmp_path / "plan.json")
    monkeypatch.setenv(plugin.PLAN, str(tmp_path / "plan.json"))
    return model, tmp_path / "model", plan


def test_the_model_of_the_plan_is_registered(vllm: dict[str, str], written: Any) -> None:
    plugin.register()
    assert vllm == dict.fromkeys(["LlamaForCausalLM", *plugin.BACKEND], plugin.MODEL)
    module, _, name = plugin.MODEL.partition(":")
    assert (module, name) == (PlannedForCausalLM.__module__, PlannedForCausalLM.__name__)


def test_nothing_is_registered_without_a_plan(
    vllm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plugin.PLAN, raising=False)
    plugin.register()
    assert not vllm
    monkeypatch.setenv(plugin.PLAN, "nowhere.json")
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        plugin.register()


def test_logits_are_those_of_the_unsplit_model(vllm: dict[str, str], written: Any) -> None:
    """Ranks have two heads or one; all have room for two."""
    model, folder, _ = written
    tokens = torch.tensor([3, 9, 4, 11, 7])

    def work(mesh: Mesh) -> tuple[Any, ...]:
        planned = PlannedForCausalLM(vllm_config=settings(folder), prefix="it")
        names = planned.load_weights([])
        assert names == {name for name, _ in planned.named_parameters()}
        with torch.inference_mode():
            hidden = planned(tokens, torch.arange(len(tokens)))
            logits = planned.compute_logits(hidden[2:])
            embedded = planned.embed_input_ids(tokens)
            with pytest.raises(UsageError, match="not embeddings"):
                planned(None, torch.arange(1), inputs_embeds=embedded[:1])
        layer = planned.layers["0"]
        return logits, embedded, (layer.num_heads, layer.num_kv_heads, layer.prefix)

    want = model(input_ids=tokens[None]).logits[0, 2:]
    for logits, embedded, layer in run_ranks(RANKS, work):
        torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)
        assert torch.equal(embedded, model.model.embed_tokens(tokens))
        assert layer == (2, 2, "it.layers.0.attn")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
        ({"lora_config": object()}, "adapters"),
        ({"quant_config": object()}, "not quantized"),
        ({"model_config": SimpleNamespace(hf_overrides={"rope_theta": 1})}, "hf_overrides"),
    ],
)
def test_settings_that_a_plan_cannot_do(
    vllm: dict[str, str], written: Any, changes: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        PlannedForCausalLM(vllm_config=settings(written[1], **changes))
