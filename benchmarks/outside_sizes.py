"""Small configs of architectures outside text: of the zoo's sizes, or with divided widths.

What a model type needs besides is in `OVERRIDES`: entries without a default, and sizes that two
parts share.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from transformers import CONFIG_MAPPING

from tests import zoo

FACTORS = (16, 4, 1)
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
          "decoder_layers", "depth", "num_encoder_layers", "num_decoder_layers")  # fmt: skip
WIDTHS = ("hidden_size", "intermediate_size", "d_model", "ffn_dim", "encoder_ffn_dim", "vocab_size",
          "decoder_ffn_dim", "embed_dim", "projection_dim", "d_ff", "dim", "mlp_dim",
          "moe_intermediate_size", "out_hidden_size", "shared_expert_intermediate_size",
          "encoder_hidden_size", "text_dim", "hidden_dim", "decoder_hidden_size")  # fmt: skip
WIDTH = re.compile("hidden|dim|channels|width|d_model|features|filters|intermediate|embed|vocab")
OTHER = re.compile("num_(?!filters)|layer|head|token|position|in_channels|audio_channels|max_|act$|factor")
"""Words in names of entries that are widths, and in those of others."""

SHARED = ("hidden_size", "d_model", "embed_dim", "dim")
"""Names of the width that heads share."""

NEEDED = {"vocab_size": 128}
"""Entries without a default that heads need."""

_NECK = {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16}
_DEPTH = {"backbone_config": {"image_size": 56}, "reassemble_hidden_size": 64, **_NECK}
_SERIES = {"prediction_length": 8, "context_length": 12, "num_time_features": 19}
_SWIN = {"depths": [1, 1, 2, 1], "embed_dim": 32, "num_heads": [2, 2, 4, 4]}
_DAVIT = {"depths": [1, 1, 1, 1], "embed_dim": [16, 32, 48, 64], "num_heads": [2, 2, 4, 4],
          "num_groups": [2, 2, 4, 4], "projection_dim": 64}  # fmt: skip
_QFORMER = {"image_token_index": 100, "num_query_tokens": 4,
            "qformer_config": {"encoder_hidden_size": 64}}  # fmt: skip
_REPVIT = {"backbone_config": {"architecture": "repvit_m0_9", "model_args": {
    "in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}},
    "backbone_channel_list": [384, 192, 96, 48],
    "backbone_feature_sizes": [[56, 56], [28, 28], [14, 14]]}  # fmt: skip
_PE = {"vision_config": {"architecture": "vit_pe_core_tiny_patch16_384", "num_classes": 64,
                         "model_args": {"depth": 2, "img_size": [224, 224], "embed_dim": 192}}}  # fmt: skip
_TEXT = {"head_dim": 16}
_ACOUSTIC = {"depths": [1] * 7, "num_filters": 2}
_DETECTION = {
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0],
        **{f"{way}_{how}ratio": [[k, 1] if way[0] == "v" else [1, k] if way[0] == "h" else [k, k],
                                 [1, 1], [k // 2 if way[0] != "h" else 0,
                                          k // 2 if way[0] != "v" else 0]]
           for way in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv",
                       "symmetric_conv_long")
           for how, k in (("long", 7), ("mid", 5), ("short", 3))}},
    "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2], "neck_out_channels": 32,
}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "blip-2": _QFORMER,
    "chmv2": {"post_process_channels": [16, 16, 32, 32], "fusion_hidden_size": 16,
              "backbone_config": {"image_size": 64}, "head_hidden_size": 16,
              "number_output_channels": 32},
    "csm": {"codec_config": {"upsample_groups": 64}, "depth_decoder_config": {
        "backbone_hidden_size": 64}, "text_vocab_size": 256, "pad_token_id": 250},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"],
                                        "num_experts_per_tok": 2}},
    "depth_anything": _DEPTH,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2,
                                        "moe_intermediate_size": 32}},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "image_size": 64, **_NECK},
    "edgetam": {"vision_config": _REPVIT},
    "edgetam_vision_model": _REPVIT,
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_mci0", "hidden_size": 1024}},
    "florence2": {"vision_config": _DAVIT},
    "gemma3n": {"vision_config": {"architecture": "convnext_atto", "hidden_size": 320},
                "vision_soft_tokens_per_image": 49},
    "gemma3n_vision": {"architecture": "convnext_atto"},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-2, 0]],
                        "spatial_target_layers": [0, 0, 1, 1]},
    "hunyuan_vl": {"text_config": _TEXT},
    "hunyuan_vl_text": _TEXT,
    "informer": _SERIES,
    "instructblip": _QFORMER,
    "instructblipvideo": {**_QFORMER, "video_token_index": 100},
    "janus": {"vq_config": {"base_channels": 32, "num_embeddings": 64, "latent_channels": 32}},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "mask2former": {"backbone_config": _SWIN},
    "maskformer": {"backbone_config": _SWIN},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "oneformer": {"backbone_config": _SWIN, "task_seq_len": 19},
    "pe_audio_video": {"audio_video_config": {"video_config": _PE}},
    "pe_audio_video_encoder": {"video_config": _PE},
    "pe_video": {"video_config": _PE},
    "pe_video_encoder": _PE,
    "perceiver": {"num_cross_attention_heads": 1, "d_latents": 64, "num_latents": 16,
                  "num_self_attends_per_block": 2, "num_self_attention_heads": 4},
    "perception_lm": {"vision_config": _PE["vision_config"]},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "pp_ocrv5_server_det": _DETECTION,
    "pp_ocrv6_medium_det": _DETECTION,
    "prompt_depth_anything": _DEPTH,
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 64}}},
    "sapiens2": {"head_config": {"upsample_out_channels": [32, 32], "conv_out_channels": [32]},
                 "num_key_value_heads_per_layer": [4, 2], "num_first_full_attention_layers": 1,
                 "num_last_full_attention_layers": 1},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "swin2sr": {**_SWIN, "image_size": 32, "depths": [1, 1], "num_heads": [2, 2]},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "time_series_transformer": _SERIES,
    "timm_backbone": {"backbone": "resnet18"},
    "timm_wrapper": {"architecture": "resnet18"},
    "tipsv2_dpt": {"backbone_config": {"image_size": 56}, **_NECK},
    "vibevoice": {"audio_config": _ACOUSTIC, "semantic_model_config": _ACOUSTIC},
    "vibevoice_acoustic_tokenizer": _ACOUSTIC,
    "vibevoice_acoustic_tokenizer_decoder": _ACOUSTIC,
    "vibevoice_acoustic_tokenizer_encoder": _ACOUSTIC,
    "vitmatte": {"backbone_config": {"image_size": 64, "num_channels": 4, "out_indices": [2]},
                 "hidden_size": 64, "convstream_hidden_sizes": [8, 16, 32],
                 "fusion_hidden_sizes": [32, 16, 8, 8]},
    "xcodec": {"acoustic_model_config": {"encoder_hidden_size": 16, "decoder_hidden_size": 256}},
    "zoedepth": {"backbone_config": {"image_size": 64}, "bottleneck_features": 32, **_NECK},
}
"""Model type -> entries of its config, nested ones too."""


def configs(kind: str) -> Iterator[Any]:
    """Yield configs of small models: of the zoo's sizes, then with divided widths and 2 layers.

    In place of one that cannot be made, the error is yielded.
    """
    cls = CONFIG_MAPPING[kind]
    special = merged(copy.deepcopy(zoo.SPECIAL.get(kind, {})), OVERRIDES.get(kind, {}))
    try:
        usual = cls()
    except Exception:  # some entries have no default
        usual = cls(**special)
    named = {
        key: {"model_type": vars(usual)[key].model_type, **value}
        if isinstance(value, dict) and hasattr(vars(usual).get(key), "to_dict") else value
        for key, value in special.items()
    }  # fmt: skip
    ways = [lambda: zoo._make(cls, merged(_said(usual), special))]
    for every, factor in product((False, True), FACTORS):
        ways.append(partial(lambda *how: _smaller(cls(**named), *how), factor, every))
    for way in ways:
        try:
            yield _fitted(way())
        except Exception as error:  # sizes do not fit together, or some have no default
            yield error


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of both, those of parts too; the other's come first."""
    both = {k: merged(v, other[k]) for k, v in one.items() if isinstance(v, dict) and k in other}
    return {**one, **other, **both}


def _said(config: Any) -> dict[str, Any]:
    """Return which flags a config sets in its parts, and of which layers it takes the output."""
    found: dict[str, Any] = {}
    for key, part in vars(config).items():
        if not hasattr(part, "to_dict"):
            continue
        usual = vars(type(part)())
        said = copy.deepcopy(zoo.SPECIAL.get(part.model_type, {}))
        flags = {k: v for k, v in vars(part).items() if isinstance(v, (bool, str))}
        said |= {k: v for k, v in flags.items() if k[0] != "_" and usual.get(k) != v}
        layers = getattr(part, "out_indices", None) or ()
        if len(layers) > 1 and hasattr(part, "num_hidden_layers"):
            said |= {"num_hidden_layers": len(layers)}
            said |= {"out_indices": list(range(1, len(layers) + 1))}
        if said := said | _said(part):
            found[key] = said
    return found


def _smaller(config: Any, factor: int, every: bool) -> Any:
    """Return a config with 2 layers and divided widths: of `every` name, and in lists."""
    for part in parts(config):
        for name, value in list(vars(part).items()):
            wide = name in WIDTHS or (every and WIDTH.search(name) and not OTHER.search(name))
            if type(value) is int and (name in LAYERS or (every and name.endswith("_layers"))):
                setattr(part, name, min(value, 2))
            elif type(value) is int and wide and value % factor == 0:
                setattr(part, name, value // factor)
            elif isinstance(value, list) and len(value) > 4 and name.endswith("types"):
                setattr(part, name, value[:2])
            elif every and isinstance(value, (list, tuple)) and {*map(type, value)} == {int}:
                if name == "depths":
                    setattr(part, name, [min(n, 2) for n in value])
                elif wide and all(n % factor == 0 for n in value):
                    setattr(part, name, [n // factor for n in value])
    return config


def _fitted(config: Any) -> Any:
    """Return a config whose entries fit its other sizes: parts of heads, numbers of tokens."""
    for part in parts(config):
        for name, value in NEEDED.items():
            if getattr(part, name, 0) is None:
                setattr(part, name, value)
        if most := getattr(part, "vocab_size", None):
            for i, name in enumerate(n for n in vars(part) if "token_id" in n):
                value = getattr(part, name)
                if type(value) is int and value >= most:
                    setattr(part, name, most - 1 - i)
        _fit_heads(part)
    return config


def _fit_heads(part: Any) -> None:
    """Let heads divide widths, and sections of rotary embeddings add up to what a head rotates."""
    names = [n for n in vars(part) if n.endswith("heads") and type(vars(part)[n]) is int]
    width = next((w for n in SHARED if type(w := vars(part).get(n)) is int), 0)
    for name in names:
        if width % vars(part)[name]:
            setattr(part, name, next(n for n in (4, 3, 2, 1) if width % n == 0))
    rope, heads = vars(part).get("rope_parameters"), vars(part).get("num_attention_heads")
    if not isinstance(rope, dict) or not heads:
        return
    head = vars(part).get("head_dim") or width // heads
    for each in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        pairs = int(head * (each.get("partial_rotary_factor") or 1)) // 2
        section = each.get("mrope_section") or [1, 1, 1]
        if sum(section) != pairs and pairs >= len(section):
            rest = [pairs * n // sum(section) for n in section[1:]]
            each["mrope_section"] = [pairs - sum(rest), *rest]


def parts(config: Any) -> list[Any]:
    """Return a config and those nested in it."""
    found = [config]
    for part in found:
        found += [v for v in vars(part).values() if hasattr(v, "to_dict") and v not in found]
    return found
