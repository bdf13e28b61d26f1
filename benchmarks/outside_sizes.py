"""Small configs of architectures outside text: of the zoo's sizes, or with divided widths.

What a model type needs besides is in `OVERRIDES`: entries without a default, and sizes that two
parts share.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
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
OTHER = re.compile(
    "num_(?!filters)|layer|head|token|position|in_channels|audio_channels|max_|act$|factor"
)
"""Words in names of entries that are widths, and in those of others."""

SHARED = ("hidden_size", "d_model", "embed_dim", "dim")
"""Names of the width that heads share."""

OUT = "out_hidden_size"
"""The width of what a tower gives to the text model."""

MROPE = "mrope_section"
"""What divides a rotary embedding among time, height and width; code has a default."""

NEEDED = {"vocab_size": 128}
"""Entries without a default that heads need."""

OVERRIDES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Model type -> entries of its config, nested ones too."""


def configs(kind: str) -> Iterator[Any]:
    """Yield configs of small models: of the zoo's sizes, then with divided widths and 2 layers.

    In place of one that cannot be made, the error is yielded.
    """
    cls = CONFIG_MAPPING[kind]
    special = merged(copy.deepcopy(zoo.SPECIAL.get(kind, {})), OVERRIDES.get(kind, {}))
    ways = [lambda: zoo._make(cls, merged(_said(_usual(cls, special)), special))]
    for every, factor in product((False, True), FACTORS):
        ways.append(
            partial(lambda *how: _smaller(cls(**_named(cls, special)), *how), factor, every)
        )
    for way in ways:
        try:
            yield _fitted(way())
        except Exception as error:  # sizes do not fit together, or some have no default
            yield error


def _usual(cls: Any, special: dict[str, Any]) -> Any:
    try:
        return cls()
    except Exception:  # some entries have no default
        return cls(**special)


def _named(cls: Any, special: dict[str, Any]) -> dict[str, Any]:
    """Return entries whose parts name their type, as those do that may have several."""
    usual = vars(_usual(cls, special))
    return {
        key: {"model_type": usual[key].model_type, **value}
        if isinstance(value, dict) and hasattr(usual.get(key), "to_dict") else value
        for key, value in special.items()
    }  # fmt: skip


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
        text = vars(part).get("text_config")
        for tower in vars(part).values() if hasattr(text, "hidden_size") else ():
            if type(getattr(tower, OUT, None)) is int:
                setattr(tower, OUT, text.hidden_size)
        for name, value in NEEDED.items():
            if getattr(part, name, 0) is None:
                setattr(part, name, value)
        if most := getattr(part, "vocab_size", None):
            for i, name in enumerate(n for n in vars(part) if "token_id" in n):
                value = getattr(part, name)
                if type(value) is int and value >= most:
                    setattr(part, name, most - 1 - i)
        window, merge = (getattr(part, n, None) for n in ("window_size", "spatial_merge_size"))
        if type(window) is int and merge and window < part.patch_size * merge:
            part.window_size = 4 * part.patch_size * merge  # a window is of whole patches
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
    own = getattr(type(part), "ignore_keys_at_rope_validation", ())
    head = vars(part).get("head_dim") or width // heads
    for each in [v for v in rope.values() if isinstance(v, dict)] or [rope]:
        pairs = int(head * (each.get("partial_rotary_factor") or 1)) // 2
        section = each.get(MROPE) or [1, 1, 1] * (MROPE in own)
        if section and sum(section) != pairs and pairs >= len(section):
            rest = [pairs * n // sum(section) for n in section[1:]]
            each[MROPE] = [pairs - sum(rest), *rest]


def parts(config: Any) -> list[Any]:
    """Return a config and those nested in it."""
    found = [config]
    for part in found:
        found += [v for v in vars(part).values() if hasattr(v, "to_dict") and v not in found]
    return found
