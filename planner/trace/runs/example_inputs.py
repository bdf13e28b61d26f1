"""Example inputs for a module, guessed from the names of its arguments and the sizes in its config.

Towers take images as pixels or as patches, and audio as frames with some bands. A trial run shows
which guess is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ

FRAMES = 296
"""Frames of audio. Halved three times, it still differs from other sizes."""

SAMPLES = 6161
"""Samples of audio: 19 windows of 400 samples, one every 320."""

BANDS = (80, 128)
"""Usual numbers of bands per frame, if the config has none."""

Shape = tuple[int, ...]


def example_inputs(module: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Tensor | None]]:
    """Yield inputs on meta that `module` may run with, by name; none for an unknown first argument.

    The first input has the dtype `dtype`.
    """
    config: Any = module.config
    parameters = inspect.signature(module.forward).parameters.values()
    taken = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not taken or taken[0].name not in FIRST:
        return
    main, *rest = taken
    needed = [p.name for p in rest if p.default is p.empty]
    known = [p.name for p in rest if p.name in needed or p.name in BESIDE]
    for shape in dict.fromkeys(FIRST[main.name](config)):
        for names in (needed, known)[: 1 + (known != needed)]:
            options = [_beside(name, shape) for name in names]
            for values in product(*options):
                first = torch.empty(shape, dtype=dtype, device="meta")
                yield {main.name: first, **dict(zip(names, values, strict=True))}


def number(config: Any, *keys: str) -> int | None:
    """Return the first of these config entries that is a positive int or a list of equal ones."""
    for key in keys:
        value = getattr(config, key, None)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        if type(value) is int and value > 0:
            return value
    return None


def _images(config: Any) -> Iterator[Shape]:
    colours = number(config, "num_channels", "in_channels", "in_chans") or 3
    if size := number(config, "image_size", "img_size"):
        yield TRACE_BATCH, colours, size, size
    if patch := number(config, "patch_size"):
        yield TRACE_BATCH, TRACE_SEQ, colours * patch * patch


def _sounds(config: Any) -> Iterator[Shape]:
    half = number(config, "max_source_positions")
    frames = 2 * half if half else FRAMES
    said = number(config, "num_mel_bins", "input_size", "feature_size", "input_dim")
    for bands in (said,) if said else BANDS:
        yield TRACE_BATCH, bands, frames
        yield TRACE_BATCH, frames, bands


def _waves(config: Any) -> Iterator[Shape]:
    frames, bands = number(config, "max_length"), number(config, "num_mel_bins")
    if frames and bands:
        yield TRACE_BATCH, frames, bands
    yield TRACE_BATCH, SAMPLES


def _states(config: Any) -> Iterator[Shape]:
    if width := number(config, "hidden_size"):
        yield TRACE_BATCH, TRACE_SEQ, width
    if bands := number(config, "input_size", "num_mel_bins", "input_dim"):
        yield TRACE_BATCH, FRAMES, bands


FIRST: dict[str, Callable[[Any], Iterator[Shape]]] = {
    "pixel_values": _images,
    "input_features": _sounds,
    "audio_features": _sounds,
    "input_values": _waves,
    "hidden_states": _states,
    "inputs_embeds": _states,
}
"""First argument of a module -> function that yields the shapes that it may have."""

BESIDE: dict[str, tuple[Shape, torch.dtype]] = {
    "attention_mask": ((), torch.bool),
    "mask": ((), torch.bool),
    "input_features_mask": ((), torch.bool),
    "pixel_position_ids": ((2,), torch.int64),
}
"""Other argument -> its dims after the first two dims of the first argument, and its dtype."""


def _beside(name: str, shape: Shape) -> list[Tensor | None]:
    if name not in BESIDE:
        return [None]
    more, dtype = BESIDE[name]
    return [torch.empty(*shape[:2], *more, dtype=dtype, device="meta"), None]
