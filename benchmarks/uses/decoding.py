"""Generation and caches."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.uses.subject import Subject, Unfit, padding, use, weigh


def _generated(s: Subject, **options: Any) -> Any:
    out = s.writer().generate(
        s.ids,
        max_new_tokens=5,
        min_new_tokens=5,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return [out.sequences, *(out.logits or ())]


@use()
def greedy(s: Subject) -> Any:
    """`generate`."""
    return _generated(s, do_sample=False)


@use()
def beams(s: Subject) -> Any:
    """Beam search."""
    return _generated(s, do_sample=False, num_beams=3)


@use()
def sampling(s: Subject) -> Any:
    """Sampling with one seed on all ranks."""
    torch.manual_seed(5)
    return _generated(s, do_sample=True)


@use()
def greedy_with_static_cache(s: Subject) -> Any:
    """`generate` with a static cache."""
    return _generated(s, do_sample=False, cache_implementation="static", disable_compile=True)


@use()
def greedy_with_padding(s: Subject) -> Any:
    """`generate` of prompts of several lengths."""
    return _generated(s, do_sample=False, **padding(s, "left"))


@use()
def prompt_lookup(s: Subject) -> Any:
    """Assisted generation without an assistant."""
    return s.writer().generate(
        s.ids[:1], max_new_tokens=5, pad_token_id=0, do_sample=False, prompt_lookup_num_tokens=2
    )


@use()
def decode_steps(s: Subject) -> Any:
    """Prefill, then token by token, by hand."""
    s.writer()
    cache, out = None, []
    rest = {k: v for k, v in s.inputs.items() if k not in ("input_ids", "use_cache")}
    with torch.no_grad():
        for part in (s.ids[:, :-3], *s.ids[:, -3:].split(1, dim=1)):
            step = s.model(input_ids=part, past_key_values=cache, use_cache=True, **rest)
            cache = step.past_key_values
            if cache is None:
                raise Unfit
            out.append(step.logits)
    return out


@use()
def gradients_through_a_cache(s: Subject) -> Any:
    """A loss of the last part, back through the cache of the first."""
    s.writer()
    rest = {k: v for k, v in s.inputs.items() if k not in ("input_ids", "use_cache")}
    first = s.model(input_ids=s.ids[:, :8], use_cache=True, **rest)
    if first.past_key_values is None:
        raise Unfit
    cache = first.past_key_values
    second = s.model(input_ids=s.ids[:, 8:], past_key_values=cache, use_cache=True, **rest)
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
