"""Tiny models of transformers that take more than text, and valid inputs for them.

Each maker gives a model and a function of a batch and a length, which makes inputs by name.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[int, int], dict[str, Any]]]

IMAGE, START, END = 7, 5, 6
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 20, "patch_size": 4, "projection_dim": 32,
}  # fmt: skip
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 96,
}  # fmt: skip


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(10, 94, (b, t))


def llava() -> Made:
    """Each image is 25 patches, in the place of as many tokens."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )

    def inputs(b: int, t: int) -> dict[str, Any]:
        ids = torch.cat([tokens(b, 2), torch.full((b, 25), IMAGE), tokens(b, t)], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
                "pixel_values": random(b, 3, 20, 20)}  # fmt: skip

    return transformers.LlavaForConditionalGeneration(config), inputs


def qwen(kind: str, **vision: Any) -> Made:
    """Each image has a grid of its own: 8 by 8 patches, or for two sequences 4 by 12 and 8 by 4."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{kind}Config")(
        vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
                       "temporal_patch_size": 2, **vision},
        text_config={**TEXT, "rope_parameters": rope}, image_token_id=IMAGE, video_token_id=8,
        vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    def inputs(b: int, t: int) -> dict[str, Any]:
        grids = [(4, 12), (8, 4)] if b == 2 else [(8, 8)] * b
        most = max(h * w // 4 for h, w in grids)
        rows = []
        for h, w in grids:
            n = h * w // 4
            image = torch.tensor([START, *[IMAGE] * n, END])
            rows.append(torch.cat([tokens(1, 1)[0], image, tokens(1, t + most - n)[0]]))
        ids = torch.stack(rows)
        found = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
            "pixel_values": random(sum(h * w for h, w in grids), 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([(1, h, w) for h, w in grids]),
        }  # fmt: skip
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            found["mm_token_type_ids"] = (ids == IMAGE).int()
        return found

    return model, inputs


def qwen2_vl() -> Made:
    return qwen("Qwen2VL", embed_dim=32, hidden_size=64, mlp_ratio=2)


def qwen2_5_vl() -> Made:
    return qwen("Qwen2_5_VL", hidden_size=32, intermediate_size=64, out_hidden_size=64,
                window_size=16, fullatt_block_indexes=[1])  # fmt: skip


def idefics3() -> Made:
    """Each image is 9 tokens: 36 patches, four to a token; padding of zeros is none."""
    config = transformers.Idefics3Config(
        vision_config={**VISION, "image_size": 24, "projection_dim": None}, scale_factor=2,
        text_config={**TEXT, "model_type": "llama", "pad_token_id": 0}, image_token_id=IMAGE,
    )  # fmt: skip

    def inputs(b: int, t: int) -> dict[str, Any]:
        ids = torch.cat([tokens(b, 2), torch.full((b, 9), IMAGE), tokens(b, t)], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
                "pixel_values": random(b, 1, 3, 24, 24)}  # fmt: skip

    return transformers.Idefics3ForConditionalGeneration(config), inputs


def paligemma() -> Made:
    config = transformers.PaliGemmaConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False,
                       "projection_dim": 64},
        text_config={**TEXT, "model_type": "gemma", "head_dim": 16}, image_token_index=IMAGE,
        projection_dim=64, hidden_size=64,
    )  # fmt: skip

    def inputs(b: int, t: int) -> dict[str, Any]:
        ids = torch.cat([torch.full((b, 25), IMAGE), tokens(b, t)], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
                "pixel_values": random(b, 3, 20, 20)}  # fmt: skip

    return transformers.PaliGemmaForConditionalGeneration(config), inputs


def clip() -> Made:
    config = transformers.CLIPConfig(
        vision_config=VISION, projection_dim=32,
        text_config={**TEXT, "hidden_size": 32, "max_position_embeddings": 64, "eos_token_id": 95},
    )  # fmt: skip

    def inputs(b: int, t: int) -> dict[str, Any]:
        ids = torch.cat([tokens(b, t), torch.full((b, 1), 95)], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
                "pixel_values": random(b, 3, 20, 20)}  # fmt: skip

    return transformers.CLIPModel(config), inputs


def whisper() -> Made:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=96,
        num_mel_bins=8, max_source_positions=20, max_target_positions=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), lambda b, t: {
        "input_features": random(b, 8, 40), "decoder_input_ids": tokens(b, t), "use_cache": False,
    }  # fmt: skip


def musicgen() -> Made:
    config = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96
        ).to_dict(),
        audio_encoder=transformers.EncodecConfig(
            hidden_size=16, num_filters=4, codebook_size=64, codebook_dim=16,
            upsampling_ratios=[4, 2], num_lstm_layers=1,
        ).to_dict(),
        decoder=transformers.MusicgenDecoderConfig(
            hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            num_codebooks=2, pad_token_id=63, bos_token_id=63,
        ).to_dict(),
    )  # fmt: skip

    def inputs(b: int, t: int) -> dict[str, Any]:
        ids = tokens(b, 11)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
                "decoder_input_ids": torch.randint(0, 60, (2 * b, t))}  # fmt: skip

    return transformers.MusicgenForConditionalGeneration(config), inputs


MODELS: dict[str, Callable[[], Made]] = {
    f.__name__: f
    for f in (llava, qwen2_vl, qwen2_5_vl, idefics3, paligemma, clip, whisper, musicgen)
}
