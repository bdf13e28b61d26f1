"""Small models whose meshes `links.py` compares."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

BATCH, SEQ = 8, 64
"""Sequences of a step, and tokens of each."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"num_hidden_layers": 6},
    "gemma2": {"head_dim": 32, "vocab_size": 8192},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 128},
    "gpt_neox": {"intermediate_size": 2048},
    "starcoder2": {"intermediate_size": 1536},
    "olmo2": {"hidden_size": 384, "intermediate_size": 1024},
    "mistral": {"intermediate_size": 512, "vocab_size": 16384},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 512},
}
"""Model type -> what differs from the common sizes."""

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "dtype": "float32",
}


def config(name: str) -> Any:
    """Return the config of a model."""
    return AutoConfig.for_model(name, **COMMON | MODELS[name])
