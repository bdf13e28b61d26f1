"""A tiny llama for tests whose heads 2 and 4 ranks do not divide, or share."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def llama(**changes: Any) -> Any:
    """Six heads of queries and three of keys in one block; `changes` are keys of its config."""
    sizes: dict[str, Any] = {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 48,
        "vocab_size": 50,
        "num_hidden_layers": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
