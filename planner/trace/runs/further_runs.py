"""Further calls that users make: with padding, labels, hidden states, embeddings, caches.

Each `Wish` is a list of alternatives: a call with as many features as possible, and simpler calls
in case that one cannot be traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.contract.names import MASKS, cache_argument
from shardwright.planner.graph.trace_sizes import TRACE_STEP
from shardwright.planner.trace.runs import decoding
from shardwright.planner.trace.runs.decoding import EMBEDDED, GIVEN, GROWING, POSITIONS, SWITCH
from shardwright.planner.trace.runs.preexisting_tensors import made
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trials import Trial, Trials
from shardwright.runtime.slots import state_of

Wish = tuple[Run, ...]
"""Alternative calls; the first one that can be traced is used."""

ENCODER_OUTPUTS = "encoder_outputs"
"""The argument for outputs of the encoder, in place of inputs of the encoder."""

SEEN = "mm_encoder_outputs"
"""The argument for outputs of towers in place of images, as `generate` passes them."""

SEE = "_prepare_multimodal_encoder_kwargs_for_generation"
"""The method that computes `SEEN` from images."""

PLACE = "_prepare_position_ids_for_generation"
"""The method that computes positions of tokens for `SEE`."""

SWITCHES = ("output_hidden_states", "output_router_logits")
"""Arguments and config entries that make a model return more."""

SHOWS = {*SWITCHES, *EMBEDDED, ENCODER_OUTPUTS, SEEN}
"""Arguments that expose internal tensors to users, as outputs or as inputs."""

SPANS = ("start_positions", "end_positions")
"""Labels with one number per sequence."""

OF_TEXT = {*GROWING, *MASKS, SWITCH}
"""The arguments of calls with text alone."""


def wishes(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[Wish, ...]:
    """Return the further calls to trace; `inputs` are the inputs of the plain call by name."""
    masks = padding(module, inputs)
    more = {name: True for name in SWITCHES if has_switch(module, name) and name not in inputs}
    labels = list(_labels(_names(module), inputs))
    trials = Trials(module)
    while labels and not inputs.keys() <= OF_TEXT:  # others often have losses of their own
        if trials.attempt(_run({**inputs, **masks, **labels[0]})) is not Trial.FAILS:
            break
        del labels[0]
    full = [*({**masks, **more, **found} for found in labels), {**masks, **more}]
    full += [*({**masks, **found} for found in labels), masks]
    found = [tuple(_run({**inputs, **more}) for more in full if more)]
    unmasked = _unmasked(module, inputs)
    embedded, seen = _embedded(module, inputs), _seen(module, inputs)
    encoded = _encoded(module, inputs)
    if not (seen or encoded) and (steps := decoded(module, inputs, found[0], embedded)):
        return (*steps, *_of_generate(module, inputs), *unmasked)
    found += [tuple(_run(_without(inputs, each)) for each in _each(embedded))] if embedded else []
    found += [(_run(_without(inputs, instead)),) for instead in (seen, encoded) if instead]
    # The last of them also fills a cache; without one, a separate call fills the cache.
    last = found.pop() if len(found) > 1 else ()
    placed = {name: value for name, value in seen.items() if name == POSITIONS}
    found += decoded(module, _without(inputs, {**encoded, **placed}), last) or [last]
    found += _text_alone(module, inputs)
    return (*(wish for wish in found if wish), *unmasked)


def _of_generate(module: nn.Module, inputs: Mapping[str, Any]) -> list[Wish]:
    """Return steps with the cache that `generate` gives, if the model itself makes another one.

    Models that are decoders only if their config says so may do that.
    """
    config, able = getattr(module, "config", None), getattr(module, "can_generate", bool)
    takes = cache_argument(_names(module))
    if not (getattr(config, "is_decoder", False) and takes and able()):
        return []
    kept = made(module, _kept_cache, {**inputs, SWITCH: True})
    return [] if kept in (None, GIVEN) else decoded(module, inputs, fills=takes)


def _kept_cache(model: Any, inputs: dict[str, Any]) -> str:
    takes = cache_argument(_names(model))
    return type(state_of(model(**inputs), model).get(takes)).__name__


def _text_alone(module: nn.Module, inputs: Mapping[str, Any]) -> list[Wish]:
    """Return the call with the tokens of `inputs` and no images or sounds, if there are any."""
    beside = {name for name, v in inputs.items() if isinstance(v, Tensor) and name not in OF_TEXT}
    names = _names(module)
    needed = {n for n in beside if n in names and names[n].default is inspect.Parameter.empty}
    if not beside or needed or not isinstance(inputs.get(GROWING[-1]), Tensor):
        return []
    text = {name: value for name, value in inputs.items() if name in OF_TEXT}
    if Trials(module).attempt(_run(text)) is Trial.FAILS:
        return []
    return decoded(module, text, tokens=()) or [(_run(text),)]


def decoded(
    module: nn.Module,
    inputs: Mapping[str, Any],
    before: Wish = (),
    embedded: Mapping[str, Tensor | None] | None = None,
    tokens: Sequence[int] = (TRACE_STEP, 1),
    fills: str = "",
) -> list[Wish]:
    """Return a call that fills a cache (`before`, or the one with `inputs`), and steps after it.

    There is a step with several tokens (chunked prompts, speculative decoding) and a step with one:
    code may do something else for each. The step with several tokens takes `embedded` inputs if
    possible. If it cannot, embeddings without a cache are preferred to tokens with a cache. The
    first call gets an empty cache as argument `fills`, if given, or if the model only takes one.
    """
    grows = decoding.grows(inputs)
    if grows is None or not (SWITCH in inputs or has_switch(module, SWITCH)):
        return []
    # The config of an encoder may have the switch as well.
    goes_on = cache_argument(_names(module)) or getattr(module, "can_generate", lambda: True)()
    filling = [_run({**given, SWITCH: True}) for given in (*(b.kwargs for b in before), inputs)]
    filling = [run._replace(fills=fills or decoding.only_taken(module)) for run in filling]
    given, found = {**inputs, **padding(module, inputs)}, [(*filling, *before)]
    for n, several in enumerate(tokens):
        steps = [*decoding.steps(given, grows, several, sum(tokens[:n]))] if goes_on else []
        calls = [_run(step)._replace(resumes=True) for step in steps]
        if several > 1 and embedded:
            every = [*_each(embedded)]
            parts = [_part(each, grows, several) for each in every]
            behind = [_run(_without(s, p))._replace(resumes=True) for p in parts for s in steps]
            calls = [*behind, *(_run(_without(inputs, each)) for each in every), *calls]
        found.append(tuple(calls))
    return [wish for wish in found if wish]


def _each(embedded: Mapping[str, Tensor | None]) -> Iterator[Mapping[str, Tensor | None]]:
    """Yield all embeddings in place of their tokens, then those of each kind alone."""
    yield embedded
    given = [name for name, value in embedded.items() if value is not None]
    for name in given if len(given) > 1 else ():
        yield {name: embedded[name], EMBEDDED[name]: None}


def _part(
    embedded: Mapping[str, Tensor | None], grows: str, tokens: int
) -> Mapping[str, Tensor | None]:
    """Return `embedded`, with the embeddings for `grows` cut to `tokens` tokens."""
    names = [n for n, value in embedded.items() if value is not None and EMBEDDED[n] == grows]
    return {n: v[:, :tokens] if v is not None and n in names else v for n, v in embedded.items()}


def _without(inputs: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """Return `inputs` updated by `instead`; inputs that are None are left out."""
    return {k: v for k, v in {**inputs, **instead}.items() if v is not None}


def padding(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the padding masks that `module` takes and that `inputs` lack."""
    names = _names(module)
    missing = [m for m in MASKS if m in names and inputs.get(m) is None]
    tokens = {m: inputs.get(MASKS[m]) for m in missing}
    each = {m: ids.clone() for m, ids in tokens.items() if isinstance(ids, Tensor)}
    # With tokens of several kinds in each place, a mask has one entry for a place.
    return {
        m: mask.flatten(2)[:, :, 0].clone() if mask.dim() > 2 else mask for m, mask in each.items()
    }


def _unmasked(module: nn.Module, inputs: Mapping[str, Any]) -> list[Wish]:
    """Return the call without the masks in `inputs`, if they are optional for `module`."""
    names = _names(module)
    given = [m for m in MASKS if inputs.get(m) is not None and m in names]
    left_out = {m: None for m in given if names[m].default is not inspect.Parameter.empty}
    return [(_run(_without(inputs, left_out)),)] if left_out else []


def _run(inputs: Mapping[str, Any]) -> Run:
    return Run("", (), inputs, priced=False)


def _names(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def has_switch(module: nn.Module, name: str) -> bool:
    """Return whether `module` takes the switch `name`, and its config has it (or its text's)."""
    names = _names(module)
    takes = name in names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    return takes and any(hasattr(config, name) for config in _configs(module))


def _configs(module: nn.Module) -> Iterator[Any]:
    """Yield the config of `module`, and the part of it for its text decoder."""
    config = getattr(module, "config", None)
    yield config
    with suppress(Exception):  # not of transformers, or without text
        yield config.get_text_config(decoder=True)  # type: ignore[union-attr]


def _labels(names: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield labels with which the model may compute a loss: per token, or per sequence."""
    tensors = (value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 1)
    first = inputs.get("decoder_input_ids", inputs.get("input_ids", next(tensors, None)))
    if not isinstance(first, Tensor) or first.dim() < 2:
        return
    each = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)
    boxes = "labels" in names and "dict" in str(names["labels"].annotation)  # of detection models
    if "labels" in names and inputs.get("labels") is None and not boxes:
        if not first.is_floating_point():
            yield {"labels": torch.zeros_like(first)}
        yield {"labels": each}
    if all(name in names and inputs.get(name) is None for name in SPANS):
        yield {name: each.clone() for name in SPANS}


def _embedded(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return embeddings for the arguments that take them, and None for the replaced tokens."""
    table = None
    with suppress(NotImplementedError, AttributeError):  # models without an embedding raise these
        found: Any = module.get_input_embeddings()  # type: ignore[operator]
        table = found.weight
    out: dict[str, Tensor | None] = {}
    for name, tokens in EMBEDDED.items():
        given = inputs.get(tokens)
        if name in _names(module) and isinstance(given, Tensor) and isinstance(table, Tensor):
            shape = (*given.shape, table.shape[-1])
            out |= {name: torch.empty(shape, dtype=table.dtype, device=given.device), tokens: None}
    return out


def _encoded(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoder's output, and None for its input, as `generate` calls the model."""
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", "input_ids")
    both = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in inputs
    given = inputs.get(main) if isinstance(main, str) else None  # some have several
    width = getattr(config, "hidden_size", None)
    if not (both and ENCODER_OUTPUTS in _names(module) and isinstance(given, Tensor) and width):
        return {}
    from transformers.modeling_outputs import BaseModelOutput, ModelOutput

    states = made(module, _encode, {main: given})  # of the class that `generate` passes
    if not isinstance(states, ModelOutput) and main == "input_ids":
        dtype = next(p.dtype for p in module.parameters())
        hidden: Any = torch.empty(*given.shape, width, dtype=dtype, device=given.device)
        states = BaseModelOutput(last_hidden_state=hidden)
    return {ENCODER_OUTPUTS: states, main: None} if isinstance(states, ModelOutput) else {}


def _encode(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_encoder()(*inputs.values(), return_dict=True)


def _seen(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return outputs of towers and positions of tokens, and None for the images replaced."""
    if not hasattr(module, SEE) or SEEN not in _names(module) or inputs.get(SEEN) is not None:
        return {}
    given = made(module, _see, inputs)
    if not (given and given.get(SEEN)):
        return {}
    new = {name: value for name, value in given.items() if name not in inputs}
    return {name: None for name in inputs if name not in given} | new


def _see(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `generate` calls `model`."""
    if POSITIONS in _names(model) and inputs.get(POSITIONS) is None and hasattr(model, PLACE):
        inputs[POSITIONS] = getattr(model, PLACE)(inputs["input_ids"], inputs)
    return getattr(model, SEE)(inputs)
