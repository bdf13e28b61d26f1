"""Tiny models with random weights of every architecture in transformers, made without a network.

`names(kind)`, `build(name, seed, kind)`, `inputs(name, config)` and `logits(output)`; kinds are
causal, seq2seq and masked. Sizes are in `zoo_sizes.py`; ZOO_NKV sets the number of kv heads.
Weights are redrawn at 1/sqrt(fan in) and vectors (norm gains, biases) perturbed, so that a bias
dropped or added twice, or a norm split wrongly, shows in the logits.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo_sizes import (
    ATTENDING,
    DIRECT,
    FORCE,
    HD,
    KNOWN,
    NH,
    NL,
    SKIP,
    SPECIAL,
    TOKEN_FIELDS,
    V,
)

KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    "seq2seq": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
}
LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "block_types",
    "attn_layers",
)
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def names(kind: str = "causal") -> list[str]:
    """The model types that build and run."""
    return [n for n in KINDS[kind][0] if n in CONFIG_MAPPING and n not in SKIP[kind]]


def tiny_config(name: str, kind: str = "causal") -> Any:
    """A config with the sizes of `zoo_sizes.py`."""
    cls = CONFIG_MAPPING[name]
    if name in DIRECT and kind == "causal":
        parts: Any = cls.sub_configs
        return _make(parts[DIRECT[name]], {})
    special = copy.deepcopy(SPECIAL.get(f"{kind}:{name}", SPECIAL.get(name, {})))
    if kind == "causal" and "is_decoder" in _fields(cls):
        special.setdefault("is_decoder", True)
    return _make(cls, special)


def build(
    name: str,
    seed: int = 0,
    kind: str = "causal",
    attn: str | None = "eager",
    randomize: bool = True,
    **overrides: Any,
) -> tuple[Any, nn.Module]:
    """A tiny model in float32 and eval mode, and its config with `overrides` set."""
    torch.manual_seed(seed)
    config = tiny_config(name, kind)
    for key, value in overrides.items():
        setattr(config, key, value)
    classes, auto = KINDS[kind]
    kwargs = {"attn_implementation": attn} if attn else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name in DIRECT and kind == "causal":
                model = getattr(transformers, classes[name])._from_config(config, **kwargs)
            else:
                model = auto.from_config(config, **kwargs)
        except ValueError as error:
            if not attn or not ("attn_implementation" in str(error) or "eager" in str(error)):
                raise
            model = auto.from_config(config)
    model = model.float().eval()
    if randomize:
        _randomize(model, seed)
    return model.config, model


def inputs(
    name: str,
    config: Any,
    batch: int = 2,
    seq: int = 16,
    seed: int = 0,
    kind: str = "causal",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Seeded arguments for the model's forward, without a cache; what is no id is of `dtype`."""
    g = torch.Generator().manual_seed(seed + 99)
    out: dict[str, Any] = {"input_ids": torch.randint(3, 90, (batch, seq), generator=g)}
    found = KINDS[kind][0][name]
    cls = getattr(transformers, found[0] if isinstance(found, (tuple, list)) else found, None)
    if cls is not None:
        taken = inspect.signature(cls.forward).parameters
        if "use_cache" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            out["use_cache"] = False
    if kind == "seq2seq":
        out["decoder_input_ids"] = torch.randint(3, 90, (batch, seq), generator=g)
    if name in DIRECT:  # a row for each codebook
        decoder = getattr(config, "decoder", config)
        books = (config if isinstance(decoder, dict) else decoder).num_codebooks
        out["input_ids"] = torch.randint(3, 90, (2 * books, 16), generator=g)
    if name in ATTENDING:
        encoded = torch.randn(2, 13, config.hidden_size, generator=g)
        out["encoder_hidden_states"] = encoded.to(dtype).requires_grad_()  # an encoder made it
    return out


def example(
    name: str, config: Any, kind: str = "causal", dtype: torch.dtype = torch.float32
) -> dict[str, Any] | None:
    """Arguments to plan a model with, where those made for any text model do not fit it."""
    if name not in DIRECT or kind != "causal":
        return None
    books = getattr(config, "decoder", config).num_codebooks
    ids = torch.zeros(3 * books, 19, dtype=torch.int64)
    encoded = torch.zeros(3, 23, config.hidden_size, dtype=dtype)
    more = {"encoder_hidden_states": encoded} if name in ATTENDING else {}
    return {"input_ids": ids, "use_cache": False, **more}


def logits(output: Any) -> torch.Tensor:
    """The first tensor that a model returns."""
    found = getattr(output, "logits", None)
    if found is not None:
        return found
    if isinstance(output, (tuple, list)):
        return output[0]
    return next(v for v in output.values() if torch.is_tensor(v))


def _fields(cls: Any) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {f.name for f in dataclasses.fields(cls)}
    return set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"}


def _get(base: Any, key: str) -> Any:
    if base is None:
        return None
    try:
        return getattr(base, key, None)
    except Exception:  # an attribute that differs from layer to layer
        return 1


def _make(cls: Any, special: dict[str, Any] | None = None, depth: int = 0) -> Any:
    return cls(**_tiny_kwargs(cls, special, depth))


def _tiny_kwargs(cls: Any, special: dict[str, Any] | None, depth: int) -> dict[str, Any]:
    special = dict(special or {})
    try:
        base = cls()
    except Exception:
        base = None
    fields = _fields(cls)
    out: dict[str, Any] = {}
    for key, value in KNOWN.items():
        if key not in fields or (base is not None and _get(base, key) is None):
            continue
        current = _get(base, key)
        listed = isinstance(current, (list, tuple, dict)) and key != "eos_token_id"
        if not (
            listed or isinstance(current, bool) or (key == "attn_pdrop" and type(current) is int)
        ):
            out[key] = value
    out |= {k: v for k, v in FORCE.items() if k in fields}
    if "kv_lora_rank" in fields and "qk_rope_head_dim" in fields:  # latent attention: no groups
        if "num_key_value_heads" in fields:
            out["num_key_value_heads"] = NH
        if "head_dim" in fields:
            out["head_dim"] = 8
    for i, key in enumerate(TOKEN_FIELDS):
        if key in fields and isinstance(_get(base, key), int):
            out[key] = V - 1 - i
    if base is not None:
        out |= _layer_lists(base, fields, out)
    out |= _parts(cls, base, special, depth)
    out.update(special)
    return out


def _layer_lists(base: Any, fields: set[str], chosen: dict[str, Any]) -> dict[str, Any]:
    """Lists with a word a layer: one layer of each kind."""
    lists: dict[str, list[str]] = {}
    for key in LAYER_LISTS:
        value: Any = getattr(base, key, None)
        given = key in fields and isinstance(value, (list, tuple)) and len(value) > 0
        if given and all(isinstance(x, str) for x in value):
            lists[key] = list(dict.fromkeys(value))
    if not lists:
        return {}
    n = max(NL, *(len(u) for u in lists.values()))
    out: dict[str, Any] = {key: n for key in LAYER_COUNTS if key in fields and key in chosen}
    for key, kinds in lists.items():
        if key == "mlp_layer_types" and len(kinds) == 2:  # dense first, then sparse
            out[key] = [kinds[0]] + [kinds[1]] * (n - 1)
        else:
            out[key] = kinds if key == "block_types" else (kinds * n)[:n]
    return out


def _parts(cls: Any, base: Any, special: dict[str, Any], depth: int) -> dict[str, Any]:
    """Tiny configs of the parts of a composite one; takes theirs out of `special`."""
    out: dict[str, Any] = {}
    for key, found in dict(getattr(cls, "sub_configs", {}) or {}).items():
        if key in special and not isinstance(special[key], dict):
            continue
        mine = special.pop(key, {})
        part = found
        if found.__name__ == "AutoConfig":
            current = getattr(base, key, None)
            if "model_type" in mine:
                part = CONFIG_MAPPING[mine.pop("model_type")]
            elif current is not None:
                part = type(current)
            else:
                continue
        if depth < 3:
            out[key] = _make(part, mine, depth + 1).to_dict()
    return out


@torch.no_grad()
def _randomize(model: nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed + 1234)
    for name, p in model.named_parameters():
        if not p.is_floating_point() or p.numel() == 0:
            continue
        r = torch.randn(p.shape, generator=g)
        if p.ndim >= 2 and min(p.shape[-1], p.shape[-2]) > 1:
            embedding = "embed" in name or "wte" in name or "wpe" in name
            p.copy_(r * 0.5 if embedding else r / math.sqrt(float(p.shape[-1])))
        else:
            p.add_(0.1 * r)


assert HD == 16, "the sizes of rotary embeddings in zoo_sizes.py are for heads of 16"
