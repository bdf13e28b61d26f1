"""Published quantized models, with the quantization that their config.json states.

Each entry names the model it was made of (`planning_models.py`), or gives its values.
"""

from __future__ import annotations

from typing import Any

from benchmarks.planning_models import MODELS, Published

BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
GPT_OSS = Published("openai/gpt-oss-120b", 116_829_156_672, {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128,
    "num_experts_per_tok": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "attention_bias": True,
    "tie_word_embeddings": False, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
})  # fmt: skip
KIMI = MODELS["deepseek-v3"].values | {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
    "vocab_size": 163840, "max_position_embeddings": 262144, "rope_theta": 50000.0,
}  # fmt: skip
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        }}},
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip
LAYERS_405B = range(126)
GROUPS = {"bits": 4, "group_size": 128}

QUANTIZED: dict[str, tuple[Published, dict[str, Any]]] = {
    "deepseek-v3-fp8": (MODELS["deepseek-v3"], BLOCKS),
    "gpt-oss-120b": (GPT_OSS, {
        "quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ]}),
    "kimi-k2-int4": (Published("moonshotai/Kimi-K2-Thinking", 0, KIMI), PACKED),
    "qwen3-235b-fp8": (MODELS["qwen3-235b-a22b"], BLOCKS | {
        "modules_to_not_convert": [
            "lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(94)),
        ]}),
    "llama-405b-fp8": (MODELS["llama-405b"], {
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": [
            "lm_head", *(f"model.layers.{i}.self_attn" for i in LAYERS_405B),
            *(f"model.layers.{i}.mlp" for i in (0, 125)),
        ]}),
    "llama-70b-awq": (MODELS["llama-70b"], {
        "quant_method": "awq", "version": "gemm", "zero_point": True, **GROUPS}),
    "llama-70b-gptq": (MODELS["llama-70b"], {
        "quant_method": "gptq", "desc_act": True, "sym": True, **GROUPS}),
}  # fmt: skip
"""Name -> the model, and its `quantization_config`."""


def config(name: str) -> Any:
    """Return the config of a published quantized model."""
    published, quantization = QUANTIZED[name]
    out = published.config()
    out.quantization_config = quantization
    return out
