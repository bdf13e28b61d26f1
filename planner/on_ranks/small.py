"""Makes a small model of the same structure as a large one, with fewer layers and less width."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.names import pattern
from shardwright.planner.on_ranks.numeric import cut, random_inputs, random_model, run
from shardwright.planner.trace.model.source import from_config
from shardwright.runtime.model.hub import USUAL, Hub

WIDTHS = re.compile("size|dim|width|rank|intermediate|ffn|d_model|d_ff|d_inner|n_embd|n_inner")
MIN_WIDTH = 16
"""Least width of a small model, so that heads and the dims that ranks split stay the same."""
FACTORS = (16, 8, 4, 2, 1)
LAYERS = (2, 4, 8, 16, 32)
MAX_PARAMETERS = 1 << 28
"""Most parameters of a model that is run here."""


def small(config: Any, hub: Hub = USUAL) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with random float32 weights, and inputs with which it has run.

    It has the same modules as the model of `config`, except for layer numbers, and as many heads,
    key heads and experts. All widths are divided by one common factor.

    Raises:
        ModelError: no smaller model runs, and the model itself is too large to be run here.
    """
    cls = type(config).__name__
    for smaller in smaller_configs(config, hub):
        try:
            tried = from_config(smaller, None, hub)
            if sum(p.numel() for p in tried.parameters()) > MAX_PARAMETERS:
                continue
            model = random_model(smaller, torch.float32, hub)
            inputs = random_inputs(model)
            run(model, **inputs)
        except Exception:  # the model's code may raise anything for widths that do not fit
            continue
        return model, inputs
    raise ModelError(
        f"no small model could be made of this {cls} to try it out: pass one of the same "
        "structure, planned alike"
    )


def smaller_configs(config: Any, hub: Hub = USUAL) -> Iterator[Any]:
    """Yield configs of smaller models with the same modules, the narrowest first, then `config`.

    Of each width, it is the one with the fewest layers. Its code may not run: widths may not fit
    together.
    """
    want = _patterns(from_config(config, None, hub))
    for factor in FACTORS:
        narrow = _narrowed(config, factor)
        for smaller in () if narrow is None else _of_few_layers(narrow):
            with suppress(ModelError):  # widths or layers do not fit together
                if _patterns(from_config(smaller, None, hub)) == want:
                    yield smaller
                    break
    yield config


def _patterns(model: nn.Module) -> set[str]:
    return {pattern(name) for name, _ in model.named_parameters(remove_duplicate=False)}


def _of_few_layers(config: Any) -> Iterator[Any]:
    """Yield copies with few layers, the fewest first, and at last all layers."""
    have = getattr(config.get_text_config(), "num_hidden_layers", None)
    yield from (cut(config, n) for n in LAYERS if isinstance(have, int) and n < have)
    yield config


def _narrowed(config: Any, factor: int) -> Any:
    """Return a copy with all widths divided by `factor`; None if one would be below `MIN_WIDTH`."""
    out = copy.deepcopy(config)
    parts = [v for v in vars(out).values() if hasattr(v, "get_text_config")]
    for part in (out, *parts):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > MIN_WIDTH and WIDTHS.search(name):
                if value // factor < MIN_WIDTH:
                    return None
                if value % factor == 0:
                    setattr(part, name, value // factor)
        vocabulary = getattr(part, "vocab_size", None)
        for name, value in list(vars(part).items()):
            if name.endswith("token_id") and type(value) is int and type(vocabulary) is int:
                setattr(part, name, min(value, vocabulary - 1))
    return out
