"""Tiny models of several kinds and their plans, to be mutated; a checkpoint for ranks that die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.planner.contract.plan_file import Plan

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model, and the plans of it that are mutated: by the arguments of `plan`."""

    config: Callable[[], Any]
    asked: tuple[dict[str, Any], ...] = ({"tp": 2},)
    tolerance: float = 1e-9


def _made(name: str, **values: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        model = name.replace("Config", "ForCausalLM")
        return getattr(transformers, name)(**{"architectures": [model]} | values)

    return make


_ALONG = {"tp": 2, "sequence_parallel": True}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61,
       "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}  # fmt: skip
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64,
         "architectures": ["GPT2LMHeadModel"], "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

KINDS = {
    "dense": Kind(
        _made("LlamaConfig", **SMALL),
        ({"tp": 2}, {"tp": 2, "pins": {"model.layers.0.mlp": "replicate"}}),
    ),
    "shared kv heads": Kind(_made("LlamaConfig", **SMALL), ({"tp": 4},)),
    "replicas": Kind(_made("LlamaConfig", **SMALL), ({"mesh": {"dp": 2, "tp": 2}},)),
    "sequence parallel": Kind(_made("LlamaConfig", **SMALL), (_ALONG,)),
    "fused qkv": Kind(_made("GPT2Config", **_GPT2)),
    "experts": Kind(
        _made("MixtralConfig", **SMALL, num_local_experts=4, num_experts_per_tok=2,
              experts_implementation="eager"),
        tolerance=1e-6,  # its router computes in float32
    ),
    "encoder and decoder": Kind(_made("T5Config", **_T5)),
    "multi-query, fused": Kind(
        _made("FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              vocab_size=61, multi_query=True, alibi=False, bos_token_id=1, eos_token_id=2)
    ),
}  # fmt: skip


def plans(kind: Kind) -> list[Plan]:
    """The plans of a kind, in float64, for least memory: so that they are split."""
    import torch

    import shardwright

    return [
        shardwright.plan(kind.config(), dtype=torch.float64, objective="memory", **how)
        for how in kind.asked
    ]


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a tiny llama whose weights are drawn with `seed`, and which 4 ranks can share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
