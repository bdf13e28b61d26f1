"""Example inputs for a model of transformers, made from its config and the names of its arguments.

Text models get token ids. A model that takes images beside text gets an image in each sequence,
with as many image tokens as the model makes features of it. Other models get images or sounds, if
their config has the sizes. A guess is tried on meta: if the model does not run, it is discarded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.errors import ModelError
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.trace.inputs.argument_options import OPTIONS, options
from shardwright.planner.trace.inputs.documented_shapes import documented
from shardwright.planner.trace.inputs.example_inputs import CONTENT, example_inputs
from shardwright.planner.trace.inputs.subject import Subject, number
from shardwright.planner.trace.model.input_values import moved
from shardwright.planner.trace.runs.decoding import SWITCH
from shardwright.planner.trace.runs.further_runs import has_switch
from shardwright.planner.trace.runs.package_calls import package_calls
from shardwright.planner.trace.runs.preexisting_tensors import made_or_raised
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trials import Trial, Trials
from shardwright.planner.trace.runs.unused_modules import settles
from shardwright.runtime.code.model_objects import has_forward

GET_BASE = "get_base_model"
"""The method of peft models that returns the model with the adapters."""

IDS, DECODER_IDS = "input_ids", "decoder_input_ids"
PIXELS, SIZES, VIEWS = "pixel_values", "image_sizes", "pixel_attention_mask"
TYPES, PLACES = "mm_token_type_ids", "image_embeds_position_mask"
"""Arguments that say which tokens stand for images."""

FEATURES = "get_image_features"
"""The method of transformers' models that returns one vector for each image token."""

OF_TOWERS = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs of a tower itself, of which `FEATURES` makes others."""

KINDS = "num_codebooks", "num_channels"
"""Entries of configs for the number of kinds of tokens in each place."""

TOKENS = ("latent_query_num", "image_seq_length", "mm_tokens_per_image")
"""Entries of configs for the number of tokens that stand for an image."""

MAX_TRIALS = 40
"""Inputs that are tried at most."""

BEFORE = 2
"""Text tokens in front of an image."""


def example_calls(module: nn.Module) -> list[dict[str, Any]]:
    """Return inputs by name of the plain call, and of further calls that the code tells apart.

    Raises:
        ModelError: the inputs are unknown; the message says what is known of them.
    """
    return package_calls(module) or [example_call(module)]


def example_call(module: nn.Module) -> dict[str, Any]:
    """Return inputs by name with which a model of transformers runs. Integers may have values.

    Raises:
        ModelError: the inputs are unknown; the message says what is known of them.
    """
    if not hasattr(getattr(module, "config", None), "to_dict") or _takes_text_alone(module):
        return text_inputs(module)
    on_data: dict[tuple[int, ...], tuple[dict[str, Any], Run]] = {}
    trials = Trials(module)
    for inputs in islice(_candidates(trials), MAX_TRIALS):
        run = Run("", (), moved(inputs))
        ended = trials.attempt(run)
        if ended is Trial.RUNS:
            return inputs
        if ended is Trial.ON_DATA:
            dims = tuple(v.dim() for v in inputs.values() if isinstance(v, Tensor))
            on_data.setdefault((*dims, SWITCH in inputs), (inputs, run))
    found = [*on_data.values()]
    if len(found) > 1:  # where the code reads data, it had not come to the end
        found = [(inputs, run) for inputs, run in found if settles(module, run)] or found
    return found[0][0] if found else text_inputs(module)


def text_inputs(module: nn.Module) -> dict[str, Any]:
    """Return token ids for a transformers text model, with sizes that differ from all others.

    Raises:
        ModelError: the model takes other inputs.
    """
    if not has_forward(module):
        raise ModelError(_without_forward(module))
    if not _takes_text(module) or {*Subject(module).needed} - {IDS}:
        inner = "plan what is in it (get_base_model()), or " if hasattr(module, GET_BASE) else ""
        raise ModelError(
            f"do not know the inputs of {type(module).__name__}{_known(module)}: {inner}give "
            f"example args or kwargs (batch {TRACE_BATCH} and sequence {TRACE_SEQ} are good sizes)"
        )
    ids = torch.zeros(TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta")
    return {IDS: ids, **_beside(module, _decodes(module))}


def _without_forward(module: nn.Module) -> str:
    """Say that only parts of a model can be called, and which those are, the largest first."""
    parts = [(n, m) for n, m in module.named_children() if has_forward(m)]
    parts.sort(key=lambda part: -sum(p.numel() for p in part[1].parameters()))
    named = ", ".join(f"{name} ({type(part).__name__})" for name, part in parts[:4])
    return (
        f"{type(module).__name__} has no forward of its own, only its parts do: plan one of these "
        f"as a module, and apply its plan to it: {named or 'none of its children'}"
    )


def _takes_text(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    return getattr(module, "main_input_name", None) is not None and IDS in names


def _takes_text_alone(module: nn.Module) -> bool:
    """Return whether a model needs token ids and knows of nothing to look at or listen to."""
    at = Subject(module)
    said = {name for name, docs in documented(at).items() if not docs.optional}
    others = ({*at.needed} | said | at.names.keys() & {*CONTENT}) - {IDS}
    return _takes_text(module) and not (others or at.number(*KINDS))


def _decodes(module: nn.Module) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))


def _beside(module: nn.Module, decodes: bool) -> dict[str, Any]:
    """Return the decoder's tokens and the switch that turns the KV cache off, if taken."""
    names, more = inspect.signature(module.forward).parameters, dict[str, Any]()
    if decodes and DECODER_IDS in names:
        more[DECODER_IDS] = torch.zeros(TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta")
    if SWITCH in names or has_switch(module, SWITCH):
        more[SWITCH] = False
    return more


def _candidates(trials: Trials) -> Iterator[dict[str, Any]]:
    """Yield token ids with an image in each sequence, then inputs by the names of arguments."""
    module = trials.root
    names = inspect.signature(module.forward).parameters
    if IDS in names and PIXELS in names:
        yield from _with_images(trials)
    # Models with a decoder of their own do not all say so.
    decoding = [_beside(module, yes) for yes in {_decodes(module): 0, DECODER_IDS in names: 0}]
    if SWITCH in decoding[0] and SWITCH not in names:  # the code may set it itself
        decoding += [{k: v for k, v in each.items() if k != SWITCH} for each in decoding]
    kinds = Subject(module).number(*KINDS)
    if DECODER_IDS in names and kinds:
        for shape in ((TRACE_BATCH, TRACE_SEQ, kinds), (TRACE_BATCH * kinds, TRACE_SEQ)):
            several = torch.zeros(shape, dtype=torch.int64, device="meta")
            decoding.append({**decoding[0], DECODER_IDS: several})
    for beside in decoding:
        for inputs in example_inputs(module):
            more = {name: v for name, v in beside.items() if name not in inputs}
            yield {**inputs, **more}


def _with_images(trials: Trials) -> Iterator[dict[str, Any]]:
    """Yield token ids with an image in each sequence, if the config says where images go."""
    module = trials.root
    names, at = inspect.signature(module.forward).parameters, Subject(module)
    image = at.number("image_token_id", "image_token_index")
    needed: dict[str, Any] = {}
    for name in at.needed:
        needed |= next(options(at, name), {})
    for images in _images(module) if image or PLACES in names else ():
        count = _image_tokens(trials, images, needed)
        if count is None:
            continue
        ids = _ids(module.config, image, count)
        given = {**needed, IDS: ids, "attention_mask": torch.ones_like(ids), **images}
        given |= _beside(module, _decodes(module))
        given[TYPES], given[PLACES] = (ids == (image or 0)).int(), ids == (image or 0)
        yield {name: value for name, value in given.items() if name in (*names, SWITCH)}


def _images(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield images for the arguments of the model, with their sizes if it takes these."""
    at = Subject(module)
    for images in OPTIONS[PIXELS](at, PIXELS):
        yield images
        if SIZES in at.names and len(images) == 1:
            yield {**images, SIZES: torch.tensor([images[PIXELS].shape[-2:]] * TRACE_BATCH)}
        if VIEWS in at.names and images[PIXELS].dim() == 5:
            yield {**images, VIEWS: torch.ones(images[PIXELS].shape[:2], dtype=torch.bool)}


def _image_tokens(
    trials: Trials, images: dict[str, Tensor], beside: dict[str, Tensor]
) -> int | None:
    """Return how many tokens stand for one image: as many as the model makes vectors of it.

    `beside` has what else the model needs, of which it may make them, too.
    """
    module = trials.root
    owner = next((part for part in module.modules() if hasattr(part, FEATURES)), None)
    taken = inspect.signature(getattr(owner, FEATURES)).parameters if owner else ()
    images = {**{name: value for name, value in beside.items() if name in taken}, **images}
    calls = [moved(images)]
    if images[PIXELS].dim() == 5:  # it may take the views of all sequences in a row
        calls.append({PIXELS: images[PIXELS].flatten(0, 1)})
    found: Any = None
    for call in calls if owner else ():
        with suppress(Exception):  # the code may raise anything
            found = trials.made(partial(made_or_raised, module, _features, call))
        if found is not None:
            break
    rows = [t.numel() // t.shape[-1] for t in tree_leaves(found) if isinstance(t, Tensor)]
    return sum(rows) // TRACE_BATCH if rows else number(module.config, *TOKENS)


def _features(model: Any, images: dict[str, Any]) -> Any:
    owner = next(module for module in model.modules() if hasattr(module, FEATURES))
    found = getattr(owner, FEATURES)(**images)
    pooled = getattr(found, "pooler_output", found)
    if pooled is not None and pooled is not found:
        return pooled
    own = [v for k, v in found.items() if k not in OF_TOWERS] if hasattr(found, "items") else []
    found = own[0] if own else pooled
    # Of pairs of a layer and what is added there, each has as many vectors as there are tokens.
    return found[0][1] if isinstance(found, list) and _is_of_layer(found[0]) else found


def _is_of_layer(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], int)


def _ids(config: Any, image: int | None, count: int) -> Tensor:
    """Return token ids with `count` tokens of an image, marked as the config says."""
    marks = [number(config, f"vision_{end}_token_id") for end in ("start", "end")]
    special = {v for c in (config, config.get_text_config()) for v in vars(c).values()
               if type(v) is int}  # fmt: skip
    text = next(i for i in range(2, len(special) + 3) if i not in special)
    start, end = ([mark] if mark and count else [] for mark in marks)
    row = [*[text] * BEFORE, *start, *[image or 0] * count, *end, *[text] * (TRACE_SEQ - BEFORE)]
    return torch.tensor([row] * TRACE_BATCH)


def _known(module: nn.Module) -> str:
    """Say which inputs a model needs, as far as its code says so."""
    at = Subject(module)
    wanted = [name for name in at.main if name in at.names]
    wanted += [name for name in at.needed if name not in wanted]
    if not wanted:
        return ""
    main = wanted[0]
    found = options(at, main) if hasattr(module, "config") else ()
    shapes = [*dict.fromkeys(str(list(option[main].shape)) for option in found)]
    tried = f" (not {' or '.join(shapes[:3])})" if shapes else ""
    return f", whose forward needs {', '.join(wanted)}{tried}"
