"""Published models whose planning is measured, with the parts of config.json that define them.

Each entry has the Hub id whose config.json is the source, the number of parameters of the published
checkpoint (which would reveal a wrong value), and the values. DeepSeek-V3 is without what
transformers leaves out or holds as buffers: the layer that predicts several tokens, the routing
biases, and the quantization of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig


@dataclass(frozen=True)
class Published:
    """A model as published on the Hub."""

    hub_id: str
    parameters: int
    values: dict[str, Any]

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """Return the config in bfloat16, or of only the first `layers` layers if given."""
        values = {k: v for k, v in self.values.items() if k != "model_type"}
        if layers is not None:
            key = "n_layer" if "n_layer" in values else "num_hidden_layers"
            values[key] = min(layers, values[key])
        return AutoConfig.for_model(self.values["model_type"], dtype="bfloat16", **values)


def _llama(parameters: int, hub_id: str, **values: Any) -> Published:
    factor = 32.0 if "3.2" in hub_id else 8.0
    rope = {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    }  # fmt: skip
    common = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": rope,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return Published(hub_id, parameters, common | values)


MODELS = {
    "llama-1b": _llama(
        1_235_814_400, "meta-llama/Llama-3.2-1B",
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        head_dim=64, tie_word_embeddings=True,
    ),
    "llama-8b": _llama(
        8_030_261_248, "meta-llama/Llama-3.1-8B",
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    ),
    "llama-70b": _llama(
        70_553_706_496, "meta-llama/Llama-3.1-70B",
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    ),
    "llama-405b": _llama(
        405_853_388_800, "meta-llama/Llama-3.1-405B",
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
    ),
    "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False,
    }),
    "deepseek-v3": Published("deepseek-ai/DeepSeek-V3", 671_026_404_352, {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "attention_bias": False, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        }, "tie_word_embeddings": False,
    }),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B", 235_093_634_560, {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "attention_bias": False, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False,
    }),
    "phi-3-mini": Published("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 2047,
        "pad_token_id": 32000, "tie_word_embeddings": False,
    }),
    "falcon-180b": Published("tiiuae/falcon-180B", 179_522_565_120, {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 14848,
        "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8,
        "vocab_size": 65024, "new_decoder_architecture": True, "multi_query": True,
        "parallel_attn": True, "bias": False, "alibi": False, "layer_norm_epsilon": 1e-05,
        "tie_word_embeddings": False,
    }),
    "bloom-176b": Published("bigscience/bloom", 176_247_271_424, {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 14336,
        "n_layer": 70, "n_head": 112, "vocab_size": 250880, "layer_norm_epsilon": 1e-05,
        "apply_residual_connection_post_layernorm": False, "slow_but_exact": False,
        "tie_word_embeddings": True,
    }),
    "gemma2-27b": Published("google/gemma-2-27b", 27_227_128_320, {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
        "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "vocab_size": 256000, "query_pre_attn_scalar": 144,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "attention_bias": False, "tie_word_embeddings": True,
    }),
}  # fmt: skip
