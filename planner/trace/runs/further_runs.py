"""What users call besides the plain call: with padding, labels, hidden states, embeddings.

Each is a wish: a full call, whose parts are proven together and traced once, and poorer ones for
where that cannot be traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.contract.names import MASKS
from shardwright.planner.graph.trace_sizes import TRACE_STEP
from shardwright.planner.trace.runs import decoding
from shardwright.planner.trace.runs.decoding import EMBEDDED, POSITIONS, SWITCH
from shardwright.planner.trace.runs.preexisting_tensors import made
from shardwright.planner.trace.runs.run import Run

Wish = tuple[Run, ...]
"""Calls of which one is traced, the first that can be."""

ENCODED = "encoder_outputs"
"""The argument for what an encoder gave, in place of what it is given."""

SEEN = "mm_encoder_outputs"
"""The argument for what towers made of images, in place of these: so `generate` calls them."""

SEE = "_prepare_multimodal_encoder_kwargs_for_generation"
"""The method that makes that, in place of images among its arguments."""

PLACE = "_prepare_position_ids_for_generation"
"""The method that makes positions of tokens for it."""

SWITCHES = ("output_hidden_states", "output_router_logits")
"""Arguments, and entries of a config, that have a model give out more."""

SHOWS = {*SWITCHES, *EMBEDDED, ENCODED, SEEN}
"""Arguments with which users are given, or give, what else stays within the model."""

SPANS = ("start_positions", "end_positions")
"""Labels that are one number for each sequence."""


def wishes(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[Wish, ...]:
    """What to trace besides the call of `module` with these inputs, by name."""
    masks = padding(module, inputs)
    more = {name: True for name in SWITCHES if _switch(module, name) and name not in inputs}
    labels = list(_labels(_names(module), inputs))
    full = [*({**masks, **more, **found} for found in labels), {**masks, **more}]
    full += [*({**masks, **found} for found in labels), masks]
    found = [tuple(_run({**inputs, **more}) for more in full if more)]
    unmasked = _unmasked(module, inputs)
    embedded, seen = _embedded(module, inputs), _seen(module, inputs)
    encoded = _encoded(module, inputs)
    if not (seen or encoded) and (steps := decoded(module, inputs, found[0], embedded)):
        return (*steps, *unmasked)
    found += [tuple(_run(_without(inputs, each)) for each in _each(embedded))] if embedded else []
    found += [(_run(_without(inputs, instead)),) for instead in (seen, encoded) if instead]
    # The last of them fills a cache as well; if there is none, a call that does that alone.
    last = found.pop() if len(found) > 1 else ()
    placed = {name: value for name, value in seen.items() if name == POSITIONS}
    found += decoded(module, _without(inputs, {**encoded, **placed}), last) or [last]
    return (*(wish for wish in found if wish), *unmasked)


def decoded(
    module: nn.Module,
    inputs: Mapping[str, Any],
    before: Wish = (),
    embedded: Mapping[str, Tensor | None] | None = None,
    tokens: Sequence[int] = (TRACE_STEP, 1),
) -> list[Wish]:
    """A call that fills a cache, `before` or else that with `inputs`, and steps behind it.

    By several tokens, as prompts come in parts and guesses are tried, and by one: code may do
    something else for each. That by several is one by what is `embedded`, if that can be; where it
    cannot, embeddings are rather proven behind no cache than tokens behind one.
    """
    grows = decoding.grows(inputs)
    if grows is None or not (SWITCH in inputs or _switch(module, SWITCH)):
        return []
    filling = [_run({**given, SWITCH: True}) for given in (*(b.kwargs for b in before), inputs)]
    filling = [run._replace(fills=decoding.only_taken(module)) for run in filling]
    given, found = {**inputs, **padding(module, inputs)}, [(*filling, *before)]
    for n, several in enumerate(tokens):
        steps = [*decoding.steps(given, grows, several, sum(tokens[:n]))]
        calls = [_run(step)._replace(resumes=True) for step in steps]
        if several > 1 and embedded:
            every = [*_each(embedded)]
            parts = [_part(each, grows, several) for each in every]
            behind = [_run(_without(s, p))._replace(resumes=True) for p in parts for s in steps]
            calls = [*behind, *(_run(_without(inputs, each)) for each in every), *calls]
        found.append(tuple(calls))
    return found


def _each(embedded: Mapping[str, Tensor | None]) -> Iterator[Mapping[str, Tensor | None]]:
    """All embeddings in place of their tokens; where that cannot be, those of one kind alone."""
    yield embedded
    given = [name for name, value in embedded.items() if value is not None]
    for name in given if len(given) > 1 else ():
        yield {name: embedded[name], EMBEDDED[name]: None}


def _part(
    embedded: Mapping[str, Tensor | None], grows: str, tokens: int
) -> Mapping[str, Tensor | None]:
    """`embedded` for so many `tokens` in place of what a step goes on with."""
    names = [n for n, value in embedded.items() if value is not None and EMBEDDED[n] == grows]
    return {n: v[:, :tokens] if v is not None and n in names else v for n, v in embedded.items()}


def _without(inputs: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs` with others for some, or without them where these are None."""
    return {k: v for k, v in {**inputs, **instead}.items() if v is not None}


def padding(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The masks that `module` takes for sequences of several lengths, where it is given none."""
    names = _names(module)
    missing = [m for m in MASKS if m in names and inputs.get(m) is None]
    tokens = {m: inputs.get(MASKS[m]) for m in missing}
    return {m: ids.clone() for m, ids in tokens.items() if isinstance(ids, Tensor)}


def _unmasked(module: nn.Module, inputs: Mapping[str, Any]) -> list[Wish]:
    """The call without the masks among `inputs`, if `module` may do without."""
    names = _names(module)
    given = [m for m in MASKS if inputs.get(m) is not None and m in names]
    left_out = {m: None for m in given if names[m].default is not inspect.Parameter.empty}
    return [(_run(_without(inputs, left_out)),)] if left_out else []


def _run(inputs: Mapping[str, Any]) -> Run:
    return Run("", (), inputs, priced=False)


def _names(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _switch(module: nn.Module, name: str) -> bool:
    """Whether `module` gives out more where it is called with this set."""
    names = _names(module)
    takes = name in names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    return takes and hasattr(getattr(module, "config", None), name)


def _labels(names: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Labels that it may take, with which it computes a loss: for each token, or each sequence."""
    tensors = (value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 1)
    first = inputs.get("decoder_input_ids", inputs.get("input_ids", next(tensors, None)))
    if not isinstance(first, Tensor) or first.dim() < 2:
        return
    each = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)
    if "labels" in names and inputs.get("labels") is None:
        if not first.is_floating_point():
            yield {"labels": torch.zeros_like(first)}
        yield {"labels": each}
    if all(name in names and inputs.get(name) is None for name in SPANS):
        yield {name: each.clone() for name in SPANS}


def _embedded(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Embeddings in place of tokens, where it takes those; None for what they stand for."""
    table = None
    with suppress(NotImplementedError, AttributeError):  # models say so, each in its way
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
    """What an encoder gave, in place of what it is given: so `generate` calls what has one."""
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", "input_ids")
    both = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in inputs
    given, width = inputs.get(main), getattr(config, "hidden_size", None)
    if not (both and ENCODED in _names(module) and isinstance(given, Tensor) and width):
        return {}
    from transformers.modeling_outputs import BaseModelOutput, ModelOutput

    states = made(module, _encode, {main: given})  # of its own class, as `generate` gives it
    if not isinstance(states, ModelOutput) and main == "input_ids":
        dtype = next(p.dtype for p in module.parameters())
        hidden: Any = torch.empty(*given.shape, width, dtype=dtype, device=given.device)
        states = BaseModelOutput(last_hidden_state=hidden)
    return {ENCODED: states, main: None} if isinstance(states, ModelOutput) else {}


def _encode(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_encoder()(*inputs.values(), return_dict=True)


def _seen(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What towers make of the images among `inputs`, in place of these, and positions beside it."""
    if not hasattr(module, SEE) or SEEN not in _names(module) or inputs.get(SEEN) is not None:
        return {}
    given = made(module, _see, inputs)
    if not (given and given.get(SEEN)):
        return {}
    new = {name: value for name, value in given.items() if name not in inputs}
    return {name: None for name in inputs if name not in given} | new


def _see(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What `generate` calls `model` with."""
    if POSITIONS in _names(model) and inputs.get(POSITIONS) is None and hasattr(model, PLACE):
        inputs[POSITIONS] = getattr(model, PLACE)(inputs["input_ids"], inputs)
    return getattr(model, SEE)(inputs)
