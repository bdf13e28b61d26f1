"""Tiny models of transformers that see and hear: each with a maker of inputs by name."""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.planner.multimodal import MODELS, Made, random, tokens

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 20, "patch_size": 4, "num_labels": 12,
}  # fmt: skip
_WITHOUT_HEAD = {k: v for k, v in SIZES.items() if k != "num_labels"}
SOUND = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3),
    "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16, "vocab_size": 32,
    "do_stable_layer_norm": True, "feat_extract_norm": "layer",
}  # fmt: skip


def _sees(kind: str, head: str = "ForImageClassification", **sizes: Any) -> Callable[[], Made]:
    def make() -> Made:
        config = getattr(transformers, f"{kind}Config")(**(sizes or SIZES))
        model = getattr(transformers, kind + head)(config)
        return model, lambda b, _: {"pixel_values": random(b, 3, *[config.image_size] * 2)}

    return make


def _hears(kind: str) -> Callable[[], Made]:
    def make() -> Made:
        config = getattr(transformers, f"{kind}Config")(**SOUND)
        model = getattr(transformers, f"{kind}ForCTC")(config)
        return model, lambda b, t: {"input_values": random(b, 8 * t + 160)}

    return make


def _audio_spectrogram() -> Made:
    config = transformers.ASTConfig(**SIZES, num_mel_bins=16, max_length=36)
    model = transformers.ASTForAudioClassification(config)
    return model, lambda b, _: {"input_values": random(b, 36, 16)}


def _blip() -> Made:
    text = {k: v for k, v in SIZES.items() if k not in ("image_size", "patch_size", "num_labels")}
    config = transformers.BlipConfig(
        vision_config=_WITHOUT_HEAD,
        text_config={**text, "vocab_size": 96, "encoder_hidden_size": 32, "bos_token_id": 1,
                     "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 3},
        projection_dim=32,
    )  # fmt: skip
    model = transformers.BlipForConditionalGeneration(config)
    return model, lambda b, t: {"pixel_values": random(b, 3, 20, 20), "input_ids": tokens(b, t)}


_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
         "window_size": 4, "num_labels": 12}  # fmt: skip
_CONV = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32,
         "num_labels": 12}  # fmt: skip

TOWERS: dict[str, Callable[[], Made]] = {
    "vision/vit": _sees("ViT"),
    "vision/deit": _sees("DeiT"),
    "vision/beit": _sees("Beit"),
    "vision/dinov2": _sees("Dinov2"),
    "vision/swin": _sees("Swin", **_SWIN),
    "vision/convnext": _sees("ConvNext", **_CONV),
    "vision/siglip": _sees("SiglipVision", "Model", **_WITHOUT_HEAD),
    "audio/wav2vec2": _hears("Wav2Vec2"),
    "audio/hubert": _hears("Hubert"),
    "audio/ast": _audio_spectrogram,
    "multimodal/blip": _blip,
    **{f"multimodal/{name}": make for name, make in MODELS.items()},
}
