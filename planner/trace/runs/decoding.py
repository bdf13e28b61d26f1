"""Decoding steps: calls that continue with the cache that an earlier call left.

Both calls are in one graph, and cache tensors flow from one to the other like any tensors. The plan
therefore proves that ranks find what they need in the cache. It also proves that a step leaves
cache tensors with the placement that it found: then the next step works like this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from shardwright.planner.contract.names import CACHE_NAMES, MASKS, cache_argument

SWITCH = "use_cache"
"""The argument that makes a model keep a cache."""

GROWING = ("decoder_input_ids", "input_ids")
"""The argument for new tokens of a step: the first of these that is given."""

EMBEDDED = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Argument for embeddings -> argument for the tokens that they replace."""

GIVEN = "DynamicCache"
"""The class of the cache that `generate` gives."""

POSITIONS = "position_ids"
"""The argument for positions of tokens."""

OF_ENCODERS = ("encoder_outputs", "encoder_hidden_states", "encoder_attention_mask")
"""Arguments for the results of an encoder; each step gets them again."""


def grows(inputs: Mapping[str, Any]) -> str | None:
    """Return the argument for new tokens of a step; None if no step can follow `inputs`."""
    if inputs.get(SWITCH):
        return None
    return next((name for name in GROWING if isinstance(inputs.get(name), Tensor)), None)


def only_taken(module: nn.Module) -> str:
    """Return the argument for a cache if `module` takes one and does not return it; else "".

    The caller then keeps the cache, as `generate` does. The return annotation of `forward` decides.
    Without an annotation the module counts as returning its cache.
    """
    forward = inspect.unwrap(type(module).forward)
    with suppress(Exception):  # annotations may be invalid
        said = get_type_hints(forward).get("return")
        fields = [getattr(c, "__dataclass_fields__", ()) for c in (*get_args(said), said)]
        takes = cache_argument(inspect.signature(forward).parameters)
        if takes and any(fields) and not {*CACHE_NAMES} & {name for f in fields for name in f}:
            return takes
    return ""


def empty_cache(module: Any) -> Any:
    """Return the empty cache that `generate` gives to `module`."""
    from transformers import DynamicCache

    return DynamicCache(config=module.config.get_text_config(decoder=True))


def tokens_of(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens or embeddings in a call."""
    names = (n for n in (*GROWING, *EMBEDDED) if isinstance(inputs.get(n), Tensor))
    return next((inputs[n].shape[1] for n in names), 0)


def without_state(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the inputs of a step with embeddings if no earlier call left a cache.

    Returns None for a step with tokens, because other calls cover it.
    """
    if all(step.get(name) is None for name in EMBEDDED):
        return None
    return {name: v for name, v in step.items() if name not in (*MASKS, SWITCH)}


def steps(
    inputs: Mapping[str, Any], grows: str, tokens: int, between: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield candidate inputs for a step with `tokens` new tokens after a call that left a cache.

    One of the candidates is to be traced. Those without positions of tokens come first, because
    most models compute positions themselves.
    """
    placed = inputs.get(POSITIONS)
    place = {POSITIONS: placed[..., :tokens].clone()} if isinstance(placed, Tensor) else {}
    others = {name: v for name, v in inputs.items() if name not in place}
    for step in _unplaced(others, grows, tokens, between):
        yield step
        if place:
            yield {**step, **place}


def _unplaced(
    inputs: Mapping[str, Any], grows: str, tokens: int, between: int
) -> Iterator[dict[str, Any]]:
    """Yield the candidates without positions.

    The candidate without images and the like comes first, because the cache holds them; results of
    an encoder stay. Padding masks also cover the tokens in the cache: those of `inputs`, and
    `between` further tokens.
    """
    token = {SWITCH: True, grows: inputs[grows][:, :tokens].clone()}
    for name, mask in inputs.items():
        if MASKS.get(name) == grows and isinstance(mask, Tensor):
            token[name] = torch.cat([mask, mask[:, : between + tokens]], 1)
    known = {*GROWING, *MASKS, *OF_ENCODERS}
    if grows == GROWING[-1] and any(
        isinstance(v, Tensor) and name not in known for name, v in inputs.items()
    ):
        kept = {n: v for n, v in inputs.items() if n in known or not isinstance(v, Tensor)}
        yield {**kept, **token}
    yield {**inputs, **token}
