"""A step of decoding: a call that goes on with the cache that one before it left.

What one call puts into a cache is what the next finds there: in the graph of both its tensors go
from the one to the other like any others. So it is proven that ranks find what they need, and that
what a step leaves lies as what it found: then the next step is as this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from shardwright.planner.contract.names import MASKS

SWITCH = "use_cache"
"""The argument that has a model keep a cache."""

GROWING = ("decoder_input_ids", "input_ids")
"""The argument that a step goes on with: the first of these that is given."""

EMBEDDED = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}
"""Arguments for what tokens are looked up as -> that with the tokens."""

CACHE = "past_key_values"
"""The argument for a cache, and the output with it."""

POSITIONS = "position_ids"
"""The argument for positions of tokens."""

ENCODED = ("encoder_outputs", "encoder_hidden_states", "encoder_attention_mask")
"""What an encoder made: steps are given it again."""


def grows(inputs: Mapping[str, Any]) -> str | None:
    """The argument that a step goes on with; None where a call with `inputs` has no cache."""
    if inputs.get(SWITCH):
        return None
    return next((name for name in GROWING if isinstance(inputs.get(name), Tensor)), None)


def only_taken(module: nn.Module) -> str:
    """The argument for a cache, if `module` takes one that it does not give out; else empty.

    Who calls it keeps the cache then, as `generate` does. The class of the output is what the code
    says that it is; where it says nothing, it gives the cache out.
    """
    forward = inspect.unwrap(type(module).forward)
    with suppress(Exception):  # what it says may be no types
        said = get_type_hints(forward).get("return")
        fields = [getattr(c, "__dataclass_fields__", ()) for c in (*get_args(said), said)]
        takes = CACHE in inspect.signature(forward).parameters
        if takes and any(fields) and not any(CACHE in names for names in fields):
            return CACHE
    return ""


def empty_cache(module: Any) -> Any:
    """The cache that `generate` gives `module` where that is given none."""
    from transformers import DynamicCache

    return DynamicCache(config=module.config.get_text_config(decoder=True))


def tokens_of(inputs: Mapping[str, Any]) -> int:
    """By how many tokens, or embeddings of such, a call goes on."""
    names = (n for n in (*GROWING, *EMBEDDED) if isinstance(inputs.get(n), Tensor))
    return next((inputs[n].shape[1] for n in names), 0)


def without_state(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call that a step is where none before it left a cache: that with embeddings.

    None for one by tokens, which other calls have.
    """
    if all(step.get(name) is None for name in EMBEDDED):
        return None
    return {name: v for name, v in step.items() if name not in (*MASKS, SWITCH)}


def steps(
    inputs: Mapping[str, Any], grows: str, tokens: int, between: int = 0
) -> Iterator[dict[str, Any]]:
    """The calls of which one is to be traced, by `tokens`, behind one that left a cache.

    First without positions of tokens, which most models count for themselves.
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
    """Those without positions.

    First without images and the like, which are in the cache, but for those of an encoder. Masks
    for padding cover what is in the cache, too: what `inputs` put there, and as many tokens as came
    `between`.
    """
    token = {SWITCH: True, grows: inputs[grows][:, :tokens].clone()}
    for name, mask in inputs.items():
        if MASKS.get(name) == grows and isinstance(mask, Tensor):
            token[name] = torch.cat([mask, mask[:, : between + tokens]], 1)
    known = {*GROWING, *MASKS, *ENCODED}
    if grows == GROWING[-1] and any(
        isinstance(v, Tensor) and name not in known for name, v in inputs.items()
    ):
        kept = {n: v for n, v in inputs.items() if n in known or not isinstance(v, Tensor)}
        yield {**kept, **token}
    yield {**inputs, **token}
