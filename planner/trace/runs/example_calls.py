"""Example inputs for a model of transformers, made from its config and the names of its arguments.

Text models get token ids. A model that takes images beside text gets an image in each sequence,
with as many image tokens as the model makes features of it. Other models get images or sounds, if
their config has the sizes. A guess is tried on meta: if the model does not run, it is discarded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.errors import ModelError
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.trace.model.input_values import remember
from shardwright.planner.trace.runs.example_inputs import FIRST, example_inputs, number
from shardwright.planner.trace.runs.preexisting_tensors import made
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.unused_modules import uses

GET_BASE = "get_base_model"
"""The method of peft models that returns the model with the adapters."""

IDS, PIXELS, GRID, SIZES = "input_ids", "pixel_values", "image_grid_thw", "image_sizes"
FEATURES = "get_image_features"
"""The method of transformers' models that returns one vector for each image token."""

BEFORE = 2
"""Text tokens in front of an image."""


def example_call(module: nn.Module) -> dict[str, Any]:
    """Return inputs by name with which a model of transformers runs. Integers may have values.

    Raises:
        ModelError: the inputs are unknown; the message says what is known of them.
    """
    names, config = inspect.signature(module.forward).parameters, getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        if IDS in names and PIXELS in names:
            candidates = _with_images(module)
        else:
            candidates = iter(()) if _takes_text(module) else _without_text(module)
        for inputs in candidates:
            meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in inputs.items()}
            if uses(module, Run("", (), remember(inputs, meta) or meta)):
                return inputs
    return text_inputs(module)


def text_inputs(module: nn.Module) -> dict[str, Any]:
    """Return token ids for a transformers text model, with sizes that differ from all others.

    Raises:
        ModelError: the model takes other inputs.
    """
    if not _takes_text(module):
        inner = "plan what is in it (get_base_model()), or " if hasattr(module, GET_BASE) else ""
        raise ModelError(
            f"do not know the inputs of {type(module).__name__}{_known(module)}: {inner}give "
            f"example args or kwargs (batch {TRACE_BATCH} and sequence {TRACE_SEQ} are good sizes)"
        )
    ids = torch.zeros(TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta")
    return {IDS: ids, **_beside(module)}


def _takes_text(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    return getattr(module, "main_input_name", None) is not None and IDS in names


def _beside(module: nn.Module) -> dict[str, Any]:
    """Return the decoder's tokens and the switch that turns the KV cache off, if taken."""
    names, more = inspect.signature(module.forward).parameters, dict[str, Any]()
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        more["decoder_input_ids"] = torch.zeros(
            TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta"
        )
    if "use_cache" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
        more["use_cache"] = False
    return more


def _without_text(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield images or sounds, in place of text."""
    for inputs in example_inputs(module, _dtype(module)):
        for more in (_beside(module), {}):
            yield {**inputs, **more}


def _with_images(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield token ids with an image in each sequence."""
    names, config = inspect.signature(module.forward).parameters, module.config
    image = number(config, "image_token_id", "image_token_index")
    if image is None and uses(module, Run("", (), text_inputs(module))):
        return  # images are optional, and nothing says where they go
    for images in _images(module):
        count = _image_tokens(module, images) if image else 0
        if count is None:
            continue
        ids = _ids(config, image, count)
        given = {IDS: ids, "attention_mask": torch.ones_like(ids), **images, **_beside(module)}
        if "mm_token_type_ids" in names:
            given["mm_token_type_ids"] = (ids == image).int()
        yield {name: value for name, value in given.items() if name in (*names, "use_cache")}


def _images(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield images for the arguments of the model: pixels, or patches and their grid."""
    names = inspect.signature(module.forward).parameters
    dtype, config = _dtype(module), module.config
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for vision in (part for part in parts if number(part, "patch_size")):
        patch = number(vision, "patch_size") or 1
        if GRID in names:
            side = 4 * (number(vision, "spatial_merge_size", "merge_size") or 1)
            deep = number(vision, "temporal_patch_size") or 1
            colours = number(vision, "in_channels", "in_chans", "num_channels") or 3
            shape = TRACE_BATCH * side * side, colours * deep * patch * patch
            grid = torch.tensor([[1, side, side]] * TRACE_BATCH)
            yield {PIXELS: torch.empty(shape, dtype=dtype, device="meta"), GRID: grid}
            continue
        for shape in FIRST[PIXELS](vision):
            pixels = torch.empty(shape, dtype=dtype, device="meta")
            yield {PIXELS: pixels}
            if SIZES in names:
                yield {PIXELS: pixels, SIZES: torch.tensor([shape[-2:]] * TRACE_BATCH)}


def _image_tokens(module: nn.Module, images: dict[str, Tensor]) -> int | None:
    """Return how many tokens stand for one image: the model makes a vector for each of them."""
    given = {k: v.to("meta") for k, v in images.items()}
    found = made(module, _features, remember(images, given) or given)
    rows = [t.numel() // t.shape[-1] for t in tree_leaves(found) if isinstance(t, Tensor)]
    return sum(rows) // TRACE_BATCH if rows else None


def _features(model: Any, images: dict[str, Any]) -> Any:
    found = getattr(model, FEATURES)(**images)
    return getattr(found, "pooler_output", found)


def _ids(config: Any, image: int | None, count: int) -> Tensor:
    """Return token ids with `count` tokens of an image, marked as the config says."""
    marks = [number(config, f"vision_{end}_token_id") for end in ("start", "end")]
    special = {v for c in (config, config.get_text_config()) for v in vars(c).values()
               if type(v) is int}  # fmt: skip
    text = next(i for i in range(2, len(special) + 3) if i not in special)
    start, end = ([mark] if mark and count else [] for mark in marks)
    row = [*[text] * BEFORE, *start, *[image or 0] * count, *end, *[text] * (TRACE_SEQ - BEFORE)]
    return torch.tensor([row] * TRACE_BATCH)


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _known(module: nn.Module) -> str:
    """Say which inputs a model needs, as far as its code says so."""
    names = inspect.signature(module.forward).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    main = getattr(module, "main_input_name", None)
    wanted = [main] if isinstance(main, str) else list(main or ())
    wanted += [
        name
        for name, p in names.items()
        if p.default is p.empty and p.kind not in variable and name not in wanted
    ]
    if not wanted:
        return ""
    config = getattr(module, "config", None)
    shapes = dict.fromkeys(FIRST[wanted[0]](config)) if config and wanted[0] in FIRST else ()
    tried = f" (not {' or '.join(str(list(shape)) for shape in shapes)})" if shapes else ""
    return f", whose forward needs {', '.join(wanted)}{tried}"
