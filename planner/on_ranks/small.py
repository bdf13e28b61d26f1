"""A small model of the same structure as a large one, to run on the CPU: fewer layers, narrower."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.names import pattern
from shardwright.planner.on_ranks.numeric import cut, random_inputs, random_model, run
from shardwright.runtime.model.build import building, empty_model
from shardwright.runtime.model.hub import USUAL, Hub

WIDTHS = re.compile("size|dim|width|rank|intermediate|ffn|d_model|d_ff|d_inner|n_embd|n_inner")
LEAST = 16
"""No width of a small model is less than that: heads, and what ranks split, stay what they are."""
FACTORS = (16, 8, 4, 2, 1)
LAYERS = (2, 4, 8, 16, 32, 1 << 20)
MOST = 1 << 28
"""Parameters of a model that is run here."""


def small(
    config: Any, trust_remote_code: bool = False, hub: Hub = USUAL
) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights, in float32, and inputs for it that were seen to run.

    It has the modules of the model of `config`, but for layer numbers, and as many heads, key
    heads and experts. What is a common divisor of all widths is taken out of them.

    Raises:
        ModelError: no smaller model runs, and the model itself is too large to be run here.
    """
    with building(config, trust_remote_code, hub) as cls:
        want = _patterns(empty_model(cls._from_config, copy.deepcopy(config)))
    for smaller in _smaller(config):
        try:
            with building(smaller, trust_remote_code, hub) as cls:
                tried = empty_model(cls._from_config, copy.deepcopy(smaller))
            if _patterns(tried) != want or sum(p.numel() for p in tried.parameters()) > MOST:
                continue
            model = random_model(smaller, torch.float32, trust_remote_code, hub)
            inputs = random_inputs(model)
            run(model, **inputs)
        except Exception:  # whatever code raises that does not fit these widths
            continue
        return model, inputs
    raise ModelError(
        f"no small model could be made of this {cls.__name__} to try it out: pass one of the same "
        "structure, planned alike"
    )


def _patterns(model: nn.Module) -> set[str]:
    return {pattern(name) for name, _ in model.named_parameters(remove_duplicate=False)}


def _smaller(config: Any) -> Iterator[Any]:
    """Configs of smaller models, the smallest first; the last is `config` itself."""
    have = getattr(config.get_text_config(), "num_hidden_layers", None)
    for factor in FACTORS:
        narrow = _narrowed(config, factor)
        if narrow is None:
            continue
        for layers in LAYERS if isinstance(have, int) else LAYERS[-1:]:
            if isinstance(have, int) and layers < have:
                yield cut(narrow, layers)
            else:
                yield narrow
                break


def _narrowed(config: Any, factor: int) -> Any:
    """A copy with all widths divided by `factor`; None where one would be less than the least."""
    out = copy.deepcopy(config)
    parts = [v for v in vars(out).values() if hasattr(v, "get_text_config")]
    for part in (out, *parts):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > LEAST and WIDTHS.search(name):
                if value // factor < LEAST:
                    return None
                if value % factor == 0:
                    setattr(part, name, value // factor)
        vocabulary = getattr(part, "vocab_size", None)
        for name, value in list(vars(part).items()):
            if name.endswith("token_id") and type(value) is int and type(vocabulary) is int:
                setattr(part, name, min(value, vocabulary - 1))
    return out
