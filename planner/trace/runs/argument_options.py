"""What the arguments of a model may be: images, patches, sounds, tokens and boxes.

An argument's name says which of these it is, and the config says their sizes. Where the config is
silent, the first layer or a usual size is taken. Each option is a dict, as some arguments belong
together: patches and the grid that they form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ

FRAMES = 296
"""Frames of audio. Halved three times, it still differs from other sizes."""

MORE_FRAMES = 400
"""The same, for code that takes whole windows of frames."""

SAMPLES = 6161
"""Samples of audio: 19 windows of 400 samples, one every 320."""

BANDS = (80, 128)
"""Usual numbers of bands per frame, if nothing says it."""

SIDE = 224
"""Usual side of an image, in pixels."""

GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hw", "grid_hw", "spatial_shapes")
"""Arguments for the patches of each image: their numbers in time, height and width."""

PADDED = "spatial_shapes"
"""The one of them whose patches are padded to a number for each image, with a mask."""

SHORT = 13
"""Tokens for models with few positions."""

BOX = 4
"""Coordinates of a box."""

Shape = tuple[int, ...]
Option = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A module whose arguments are wanted, and the dtype of its floating inputs."""

    module: nn.Module
    dtype: torch.dtype

    @cached_property
    def names(self) -> dict[str, inspect.Parameter]:
        """The named arguments of its forward."""
        found = inspect.signature(self.module.forward).parameters
        return {n: p for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @cached_property
    def needed(self) -> list[str]:
        """Those without a default."""
        return [name for name, p in self.names.items() if p.default is p.empty]

    @cached_property
    def configs(self) -> list[Any]:
        """Its config and those nested in it, outer ones first."""
        found: list[Any] = [getattr(self.module, "config", None)]
        for config in found:
            nested = vars(config).values() if hasattr(config, "__dict__") else ()
            found += [v for v in nested if hasattr(v, "to_dict") and v not in found]
        return found

    def floats(self, *shape: int) -> Tensor:
        """Return a floating tensor on meta."""
        return torch.empty(shape, dtype=self.dtype, device="meta")


def number(config: Any, *keys: str) -> int | None:
    """Return the first of these config entries that is a positive int or a list of equal ones."""
    for key in keys:
        value = getattr(config, key, None)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        if type(value) is int and value > 0:
            return value
    return None


def _sides(config: Any) -> tuple[int, int] | None:
    """Return the height and width of an image, if the config has them."""
    for key in ("image_size", "img_size", "max_img_size"):
        value = getattr(config, key, None)
        if isinstance(value, dict):
            value = [value.get("height"), value.get("width")]
        value = [value, value] if type(value) is int else value
        if isinstance(value, (list, tuple)) and len(value) == 2:
            high, wide = value
            if type(high) is int and type(wide) is int and min(high, wide) > 0:
                return high, wide
    return None


def _colours(config: Any) -> int:
    return number(config, "num_channels", "in_channels", "in_chans") or 3


def _first_width(module: nn.Module) -> int | None:
    """Return how many features the first layer with weights takes."""
    for layer in module.modules():
        found = getattr(layer, "in_features", None) or getattr(layer, "in_channels", None)
        if isinstance(found, int):
            return found
    return None


def _images(at: Subject, name: str) -> Iterator[Option]:
    """Yield patches and their grid, images, patches, and images of several frames or views."""
    yield from _patches(at, name)
    sizes = [(config, sides) for config in at.configs if (sides := _sides(config))]
    sizes += [(config, (SIDE, SIDE)) for config in at.configs[:1]]
    shapes = dict.fromkeys((_colours(config), *sides) for config, sides in sizes)
    frames = (number(config, "num_frames", "frames_per_clip") for config in at.configs)
    for shape, n in product(shapes, (*dict.fromkeys(n for n in frames if n), None)):
        yield {name: at.floats(TRACE_BATCH, *((n,) if n else ()), *shape)}
    for config in at.configs:
        if patch := number(config, "patch_size"):
            yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, _colours(config) * patch * patch)}
    for shape in shapes:
        yield {name: at.floats(TRACE_BATCH, 2, *shape)}


def _patches(at: Subject, name: str) -> Iterator[Option]:
    """Yield the patches of an image for each sequence, with the grid that they form."""
    grid = next((n for n in GRIDS if n in at.names), None)
    for config in at.configs if grid else ():
        merged = number(config, "spatial_merge_size", "merge_size") or 1
        patch, colours = number(config, "patch_size") or 1, _colours(config)
        deep, side = number(config, "temporal_patch_size") or 1, 4 * merged
        axes = (1, side, side) if str(grid).endswith("_thw") else (side, side)
        beside = {str(grid): torch.tensor([axes] * TRACE_BATCH)}
        if "merge_sizes" in at.names:
            beside["merge_sizes"] = torch.tensor([merged] * TRACE_BATCH)
        rows = (TRACE_BATCH * side * side,)
        if grid == PADDED:
            rows = TRACE_BATCH, side * side
            beside["pixel_attention_mask"] = torch.ones(rows, dtype=torch.int64)
        beside = {key: value for key, value in beside.items() if key in at.names}
        widths = (colours * deep * patch * patch, _first_width(at.module))
        for width in dict.fromkeys(w for w in widths if w):
            yield {name: at.floats(*rows, width), **beside}
        yield {name: at.floats(*rows, colours, patch, patch), **beside}


def _sounds(at: Subject, name: str) -> Iterator[Option]:
    """Yield frames of some bands each, with as many bands as a config or the first layer says."""
    keys = "num_mel_bins", "input_size", "feature_size", "input_dim"
    said = [n for config in at.configs if (n := number(config, *keys))]
    every = [n for n in (*(said or BANDS), _first_width(at.module)) if n]
    halves = [2 * n for config in at.configs if (n := number(config, "max_source_positions"))]
    for bands, frames in product(dict.fromkeys(every), halves or (FRAMES, MORE_FRAMES)):
        yield {name: at.floats(TRACE_BATCH, bands, frames)}
        yield {name: at.floats(TRACE_BATCH, frames, bands)}
        yield {name: at.floats(TRACE_BATCH, 1, frames, bands)}


def _waves(at: Subject, name: str) -> Iterator[Option]:
    for config in at.configs:
        frames, bands = number(config, "max_length"), number(config, "num_mel_bins")
        if frames and bands:
            yield {name: at.floats(TRACE_BATCH, frames, bands)}
    yield {name: at.floats(TRACE_BATCH, SAMPLES)}
    yield {name: at.floats(TRACE_BATCH, 1, SAMPLES)}


def _states(at: Subject, name: str) -> Iterator[Option]:
    yield from _patches(at, name)
    config = at.configs[0]
    if width := number(config, "hidden_size"):
        yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, width)}
    if bands := number(config, "input_size", "num_mel_bins", "input_dim"):
        yield {name: at.floats(TRACE_BATCH, FRAMES, bands)}


def _placed_patches(at: Subject, name: str) -> Iterator[Option]:
    """Yield patches, in front of each its row and column."""
    if width := _first_width(at.module):
        yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, 2 + width)}


def _tokens(at: Subject, name: str) -> Iterator[Option]:
    """Yield token ids; fewer if a config has no positions for so many."""
    most = (number(config, "max_position_embeddings") or TRACE_SEQ for config in at.configs)
    for length in (TRACE_SEQ,) if min(most) >= TRACE_SEQ else (TRACE_SEQ, SHORT):
        yield {name: torch.zeros(TRACE_BATCH, length, dtype=torch.int64, device="meta")}


def _boxes(_at: Subject, name: str) -> Iterator[Option]:
    yield {name: torch.zeros(TRACE_BATCH, TRACE_SEQ, BOX, dtype=torch.int64)}


def _series(at: Subject, name: str) -> Iterator[Option]:
    """Yield time series: one channel, or as many as the config has."""
    config = at.configs[0]
    length = number(config, "context_length") or TRACE_SEQ
    lags = getattr(config, "lags_sequence", None) or [0]
    if channels := number(config, "num_input_channels", "input_size"):
        yield {name: at.floats(TRACE_BATCH, length + max(lags), channels)}
    yield {name: at.floats(TRACE_BATCH, length + max(lags))}


OPTIONS: dict[str, Callable[[Subject, str], Iterator[Option]]] = {
    "input_ids": _tokens,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "flattened_patches": _placed_patches,
    "input_features": _sounds,
    "audio_features": _sounds,
    "audio_mel": _sounds,
    "input_values": _waves,
    "hidden_states": _states,
    "inputs_embeds": _states,
    "query_embeds": _states,
    "qformer_input_ids": _tokens,
    "bbox": _boxes,
    "past_values": _series,
}
"""Argument -> function that yields what it may be, with the arguments that belong to it."""

BESIDE: dict[str, tuple[Shape, torch.dtype]] = {
    "attention_mask": ((), torch.bool),
    "mask": ((), torch.bool),
    "input_features_mask": ((), torch.bool),
    "audio_mel_mask": ((), torch.bool),
    "pixel_position_ids": ((2,), torch.int64),
}
"""Other argument -> its dims after two dims of the first argument, and its dtype."""


def beside(name: str, shape: Shape) -> list[Tensor | None]:
    """Return what an argument may be beside a first argument of this shape."""
    if name not in BESIDE:
        return [None]
    more, dtype = BESIDE[name]
    rows = dict.fromkeys((shape[:2], (shape[0], shape[-1])))
    return [*(torch.empty(*row, *more, dtype=dtype, device="meta") for row in rows), None]
