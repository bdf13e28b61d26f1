"""Generation and caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.uses.subject import Subject, Unfit, padding, use, weigh

NOT_FOR_GENERATE = ("use_cache", "decoder_input_ids")


def _given(s: Subject) -> dict[str, Any]:
    return {name: v for name, v in s.inputs.items() if name not in NOT_FOR_GENERATE}


def _generated(s: Subject, **options: Any) -> Any:
    out = s.writer().generate(
        **{**_given(s), **options},
        max_new_tokens=5,
        min_new_tokens=5,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return [out.sequences, *(out.logits or ())]


def _tokens(s: Subject) -> str:
    """The argument that a step goes on with."""
    return next(n for n in ("decoder_input_ids", "input_ids") if n in s.inputs)


@use()
def greedy(s: Subject) -> Any:
    """`generate`."""
    return _generated(s, do_sample=False)


@use()
def beams(s: Subject) -> Any:
    """Beam search."""
    return _generated(s, do_sample=False, num_beams=3)


@use(own_process=True)
def sampling(s: Subject) -> Any:
    """Sampling with one seed on all ranks."""
    torch.manual_seed(5)
    return _generated(s, do_sample=True)


@use()
def greedy_with_static_cache(s: Subject) -> Any:
    """`generate` with a static cache."""
    return _generated(s, do_sample=False, cache_implementation="static", disable_compile=True)


@use(own_process=True)
def several_samples(s: Subject) -> Any:
    """Several sequences sampled for each prompt."""
    torch.manual_seed(6)
    return _generated(s, do_sample=True, num_return_sequences=2, top_k=5, temperature=0.7)


@use()
def greedy_without_cache(s: Subject) -> Any:
    """`generate` that computes all again for each token."""
    return _generated(s, do_sample=False, use_cache=False)


@use(own_process=True)
def sampled_beams(s: Subject) -> Any:
    """Beam search that draws."""
    torch.manual_seed(7)
    return _generated(s, do_sample=True, num_beams=2)


@use()
def greedy_with_padding(s: Subject) -> Any:
    """`generate` of prompts of several lengths."""
    return _generated(s, do_sample=False, **padding(s, "left"))


@use()
def prompt_lookup(s: Subject) -> Any:
    """Assisted generation without an assistant."""
    given = {n: v[:1] if isinstance(v, Tensor) else v for n, v in _given(s).items()}
    return s.writer().generate(
        **given, max_new_tokens=5, pad_token_id=0, do_sample=False, prompt_lookup_num_tokens=2
    )


@use()
def decode_steps(s: Subject) -> Any:
    """Prefill, then token by token, by hand."""
    s.writer()
    cache, out = None, []
    tokens = _tokens(s)
    ids = s.inputs[tokens]
    rest = {k: v for k, v in s.inputs.items() if k not in (tokens, "use_cache")}
    with torch.no_grad():
        for part in (ids[:, :-3], *ids[:, -3:].split(1, dim=1)):
            step = s.model(**{tokens: part}, past_key_values=cache, use_cache=True, **rest)
            cache = step.past_key_values
            if cache is None:
                raise Unfit
            out.append(step.logits)
    return out


@use()
def gradients_through_a_cache(s: Subject) -> Any:
    """A loss of the last part, back through the cache of the first."""
    s.writer()
    tokens = _tokens(s)
    ids = s.inputs[tokens]
    rest = {k: v for k, v in s.inputs.items() if k not in (tokens, "use_cache")}
    first = s.model(**{tokens: ids[:, :-3]}, use_cache=True, **rest)
    if first.past_key_values is None:
        raise Unfit
    cache = first.past_key_values
    second = s.model(**{tokens: ids[:, -3:]}, past_key_values=cache, use_cache=True, **rest)
    weigh(second.logits).backward()
    return second.logits


@use(may_refuse=True)
def cached_keys(s: Subject) -> Any:
    """What the cache holds."""
    s.writer()
    out = s.call(use_cache=True)
    layers = getattr(out.past_key_values, "layers", None)
    if not layers or getattr(layers[0], "keys", None) is None:
        raise Unfit
    return [layer.keys for layer in layers if getattr(layer, "keys", None) is not None]
