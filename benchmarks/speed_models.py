"""The models of `speed.py`: dense, with fused projections, with experts; random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Phi3Config

VOCABULARY = 32000
SIZES: dict[str, dict[str, tuple[int, int, int]]] = {
    # size -> model -> (width, inner width, layers)
    "full": {"dense": (1024, 2816, 8), "fused": (768, 2048, 6), "mixture": (512, 1024, 4)},
    "large": {"dense": (4096, 14336, 8), "fused": (4096, 14336, 8), "mixture": (2048, 4096, 8)},
    "8b": {"dense": (4096, 14336, 32)},
    "tiny": {"dense": (64, 128, 2), "fused": (64, 128, 2), "mixture": (64, 128, 2)},
}
"""`full` is for CPUs: 168 M, 92 M and 84 M parameters, of which 33, 25 and 16 M are embeddings.
`large` is for GPUs: 2,450 M, 2,450 M and 1,870 M."""


def config(name: str, size: str) -> Any:
    """Return the config of a model: "dense", "fused" or "mixture"."""
    width, inside, layers = SIZES[size][name]
    heads = max(width // 64, 4)
    shared: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY if size == "full" else 256,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if name == "dense":
        return LlamaConfig(**shared)
    if name == "fused":
        return Phi3Config(**shared)
    return MixtralConfig(**shared, num_local_experts=8, num_experts_per_tok=2)


def make(name: str, size: str, folder: Path, dtype: Any, device: str = "cpu") -> int:
    """Write a model's checkpoint; return its number of parameters."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config(name, size), dtype=dtype)
    made.save_pretrained(folder)
    return sum(p.numel() for p in made.parameters())
