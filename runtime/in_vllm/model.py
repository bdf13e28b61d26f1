"""The class of planned models in vLLM. Each worker loads its part of the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import load
from shardwright.runtime.in_vllm.attention import InVllm, LayerAttention
from shardwright.runtime.in_vllm.plugin import PLAN
from shardwright.runtime.in_vllm.row_model import RowModel
from shardwright.runtime.model.build import building, empty_model
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import Hub


class PlannedForCausalLM(nn.Module):
    """A split model, as vLLM calls it.

    Args:
        vllm_config: vLLM's settings.
        prefix: Before names of layers.

    Raises:
        UsageError: the model or vLLM's settings ask for what a plan cannot do in vLLM.
        PlanError: the plan is for another model, or another number of ranks.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

        asked, device = vllm_config.model_config, vllm_config.device_config.device
        _check_settings(vllm_config)
        plan, ranks = Plan.load(os.environ[PLAN]), get_tp_group()
        mesh = DeviceMesh.from_group(
            ranks.device_group, torch.device(device).type, mesh_dim_names=("tp",)
        )
        how = {"trust_remote_code": asked.trust_remote_code, "revision": asked.revision}
        self.split: Any = load(
            asked.model, plan, mesh=mesh, dtype=asked.dtype, device=device, **how
        )
        self.rows = RowModel(self.split, _unsplit(asked.model, Hub(**how)), asked.max_model_len)
        self.layers = _layers(self.rows.layers, vllm_config, prefix, ranks.cpu_group)
        self.attends = InVllm({int(n): layer for n, layer in self.layers.items()})

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [tokens, width] of tokens."""
        return self.split.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [tokens, width] of the tokens of all requests.

        Raises:
            UsageError: embeddings are given in place of tokens.
        """
        if input_ids is None or inputs_embeds is not None:
            raise UsageError("a planned model in vLLM takes tokens, not embeddings of prompts")
        return self.rows.hidden(self.attends, input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [rows, words] of hidden states [rows, width]."""
        return self.rows.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Return the names of all parameters: they were loaded when the model was built."""
        return {name for name, _ in self.named_parameters()}


def _check_settings(vllm_config: Any) -> None:
    """Check what vLLM is told to do.

    Raises:
        UsageError: a plan cannot do it.
    """
    ranks = vllm_config.parallel_config
    if ranks.pipeline_parallel_size > 1:
        raise UsageError(
            "a planned model in vLLM runs without pipeline stages: --pipeline-parallel-size 1"
        )
    if vllm_config.lora_config is not None:
        raise UsageError("a planned model in vLLM takes no adapters: merge them into its weights")
    if vllm_config.quant_config is not None:
        raise UsageError(
            "a planned model in vLLM is not quantized: serve it with `shardwright serve`"
        )
    if vllm_config.model_config.hf_overrides:
        raise UsageError(
            "a planned model in vLLM has the config of its files: leave out hf_overrides"
        )


def _unsplit(name: str, hub: Hub) -> Any:
    """The model without weights."""
    config = read_config(name, hub)
    with building(config, hub) as cls:
        return empty_model(cls._from_config, config)


def _layers(
    asked: dict[int, LayerAttention], vllm_config: Any, prefix: str, group: Any
) -> nn.ModuleDict:
    """Make vLLM's layers of attention, by number, alike on all ranks.

    Raises:
        UsageError: ranks have different numbers of query heads for a key head.
    """
    from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]

    out = nn.ModuleDict()
    heads = torch.tensor([[e.heads, e.key_heads] for e in asked.values()], device="cpu")
    everyone = [torch.empty_like(heads) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, heads, group)
    by_layer = torch.stack(everyone, 1).tolist()
    for (number, layer), ranks in zip(asked.items(), by_layer, strict=True):
        many, keys = (max(column) for column in zip(*ranks, strict=True))
        if any(own * keys != many * own_keys for own, own_keys in ranks):
            raise UsageError(f"ranks have different numbers of query heads for a key head: {ranks}")
        cache_config = copy.copy(vllm_config.cache_config)
        cache_config.sliding_window = layer.window
        name = f"{prefix}.layers.{number}.attn".lstrip(".")
        out[str(number)] = Attention(
            many,
            layer.width,
            layer.scale,
            num_kv_heads=keys,
            cache_config=cache_config,
            per_layer_sliding_window=layer.window,
            prefix=name,
        )
    return out
