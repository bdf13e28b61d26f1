"""What the arguments of a model may be: images, patches, sounds, tokens and boxes.

An argument's name says which of these it is, and the config says their sizes. Where the config is
silent, the first layer or a usual size is taken. Each option is a dict, as some arguments belong
together: patches and the grid that they form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ, TRACE_SOURCE
from shardwright.planner.trace.inputs.documented_shapes import as_documented
from shardwright.planner.trace.inputs.subject import Subject, number, sides

FRAMES = 296
"""Frames of audio. Halved three times, it still differs from other sizes."""

MORE_FRAMES = 400
"""The same, for code that takes whole windows of frames."""

SAMPLES = 6161
"""Samples of audio: 19 windows of 400 samples, one every 320."""

MORE_SAMPLES = 9 * 1920
"""The same, for code that takes whole windows of samples."""

BANDS = (80, 128)
"""Usual numbers of bands per frame, if nothing says it."""

SIDE = 224
"""Usual side of an image, in pixels."""

USUAL = SIDE, SIDE
OTHER_IMAGE_SIZES = ((48, 320), (96, 320), (672, 672), (1536, 1536))
"""Heights and widths of lines of text, of larger images, and of images that are cut into tiles."""

PADDED, IN_A_ROW = "spatial_shapes", "target_sizes"
GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hw", "grid_hw", PADDED, IN_A_ROW)
"""Arguments for the patches of each image: their numbers in time, height and width.

With `PADDED`, patches are padded to a number for each image, with a mask. With `IN_A_ROW`, those of
all images are next to each other in one long image.
"""

PROMPTS = ("prompt_pixel_values", "prompt_masks")
"""Arguments for images that the model puts above the one that it is asked about."""

POSITIONS = "pixel_position_ids"
"""The argument for the column and row of each patch."""

SHORT = 13
"""Tokens for models with few positions."""

BOX = 4
"""Coordinates of a box."""

Shape = tuple[int, ...]
Option = dict[str, Tensor]


def _colours(config: Any) -> int:
    return number(config, "num_channels", "in_channels", "in_chans") or 3


def _images(at: Subject, name: str) -> Iterator[Option]:
    """Yield patches and their grid, images, patches, and images of several frames or views."""
    yield from _patches(at, name)
    yield from _positioned(at, name)
    yield from _below_prompts(at, name)
    said = [(config, size) for config in at.configs if (size := sides(config))]
    if not said and at.stated_sides:
        said = [(at.configs[0], at.stated_sides)]
    shapes = [
        *dict.fromkeys(
            (_colours(config), *size) for config, size in (*said, (at.configs[0], USUAL))
        )
    ]
    frames = (number(config, "num_frames", "frames_per_clip") for config in at.configs)
    for shape, n in product(shapes, (*dict.fromkeys(n for n in frames if n), None)):
        yield {name: at.floats(TRACE_BATCH, *((n,) if n else ()), *shape)}
    for config in at.configs:
        if patch := number(config, "patch_size"):
            yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, _colours(config) * patch * patch)}
    for shape in shapes:
        yield {name: at.floats(TRACE_BATCH, 2, *shape)}
    for size in OTHER_IMAGE_SIZES:
        yield {name: at.floats(TRACE_BATCH, _colours(at.configs[0]), *size)}


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
        count = TRACE_BATCH * side * side
        if grid == IN_A_ROW:
            yield {name: at.floats(1, colours, patch, count * patch), **beside}
            continue
        rows = (count,)
        if grid == PADDED:
            rows = TRACE_BATCH, side * side
            beside["pixel_attention_mask"] = torch.ones(rows, dtype=torch.int64)
        beside = {key: value for key, value in beside.items() if key in at.names}
        widths = (colours * deep * patch * patch, at.first_width)
        for width in dict.fromkeys(w for w in widths if w):
            yield {name: at.floats(*rows, width), **beside}
        yield {name: at.floats(*rows, colours, patch, patch), **beside}
        yield {name: at.floats(*rows, merged * patch, merged * patch, colours), **beside}


def _positioned(at: Subject, name: str) -> Iterator[Option]:
    """Yield the patches of a square image for each sequence, with the column and row of each."""
    for config in at.configs if POSITIONS in at.names else ():
        if patch := number(config, "patch_size"):
            side = 4 * (number(config, "pooling_kernel_size") or 1)
            places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
            pixels = at.floats(TRACE_BATCH, side * side, _colours(config) * patch * patch)
            yield {name: pixels, POSITIONS: places.expand(TRACE_BATCH, -1, -1)}


def _below_prompts(at: Subject, name: str) -> Iterator[Option]:
    """Yield images that are half as high as the config says, with prompts of the same size."""
    for config in at.configs if {*PROMPTS} <= {*at.names} else ():
        if size := sides(config):
            shape = TRACE_BATCH, _colours(config), size[0] // 2, size[1]
            yield {key: at.floats(*shape) for key in (name, *PROMPTS)}


def _sounds(at: Subject, name: str) -> Iterator[Option]:
    """Yield frames of some bands each, with as many bands as a config or the first layer says."""
    keys = "num_mel_bins", "input_size", "feature_size", "input_dim", "feature_projection_input_dim"
    every = [n for config in at.configs if (n := number(config, *keys))] or [*BANDS]
    every += [at.first_width] if at.first_width else []
    every = [n for i, n in enumerate(every) if n not in every[:i]]
    halves = [2 * n for config in at.configs if (n := number(config, "max_source_positions"))]
    each = at.number("audio_length_per_tok")
    said = halves or ([TRACE_SEQ * each] if each else [])
    for bands, frames in product(every, said or (FRAMES, MORE_FRAMES)):
        yield {name: at.floats(TRACE_BATCH, bands, frames)}
        yield {name: at.floats(TRACE_BATCH, frames, bands)}
        yield {name: at.floats(TRACE_BATCH, 1, frames, bands)}
    if "input_values" in at.names:
        for bands in every:
            yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, bands)}  # as many as windows of samples


def _waves(at: Subject, name: str) -> Iterator[Option]:
    for config in at.configs:
        frames, bands = number(config, "max_length"), number(config, "num_mel_bins")
        if frames and bands:
            yield {name: at.floats(TRACE_BATCH, frames, bands)}
    yield {name: at.floats(TRACE_BATCH, SAMPLES)}
    yield {name: at.floats(TRACE_BATCH, 1, SAMPLES)}
    yield {name: at.floats(TRACE_BATCH, MORE_SAMPLES)}


def _anything(at: Subject, name: str) -> Iterator[Option]:
    """Yield waves; images, if a config has their size."""
    yield from _waves(at, name)
    if any(sides(config) for config in at.configs):
        yield from _images(at, name)


def _states(at: Subject, name: str) -> Iterator[Option]:
    yield from _patches(at, name)
    config = at.configs[0]
    if width := number(config, "hidden_size"):
        yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, width)}
    if bands := number(config, "input_size", "num_mel_bins", "input_dim"):
        yield {name: at.floats(TRACE_BATCH, FRAMES, bands)}
    if width := at.first_width:
        yield {name: at.floats(TRACE_BATCH, width, SAMPLES if width == 1 else TRACE_SEQ)}


def _encoded(at: Subject, name: str) -> Iterator[Option]:
    """Yield the states of an encoder that this module attends to."""
    keys = "encoder_hidden_size", "cross_attention_hidden_size", "hidden_size"
    for width in dict.fromkeys(number(at.configs[0], key) for key in keys):
        if width:
            yield {name: at.floats(TRACE_BATCH, TRACE_SOURCE, width)}


def _placed_patches(at: Subject, name: str) -> Iterator[Option]:
    """Yield patches, in front of each its row and column."""
    if width := at.first_width:
        yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, 2 + width)}


def _tokens(at: Subject, name: str) -> Iterator[Option]:
    """Yield token ids; fewer if a config has no positions for so many; those of codebooks."""
    most = (number(config, "max_position_embeddings") or TRACE_SEQ for config in at.configs)
    for length in (TRACE_SEQ,) if min(most) >= TRACE_SEQ else (TRACE_SEQ, SHORT):
        yield {name: _ids(TRACE_BATCH, length)}
    if books := number(at.configs[0], "num_codebooks"):
        yield {name: _ids(TRACE_BATCH, TRACE_SEQ, books)}
        yield {name: _ids(TRACE_BATCH, TRACE_SEQ, books + 1)}
        yield {name: _ids(TRACE_BATCH * books, TRACE_SEQ)}


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


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
    "inputs": _anything,
    "encoder_hidden_states": _encoded,
}
"""Argument -> function that yields what it may be, with the arguments that belong to it."""

BESIDE: dict[str, tuple[Shape, torch.dtype]] = {
    "attention_mask": ((), torch.bool),
    "mask": ((), torch.bool),
    "input_features_mask": ((), torch.bool),
    "audio_mel_mask": ((), torch.bool),
    "image_attention_mask": ((2,), torch.int64),
}
"""Other argument -> its dims after two dims of the first argument, and its dtype."""


def options(at: Subject, name: str) -> Iterator[Option]:
    """Yield what an argument may be: by its name, as docs say, or as wide as a config says."""
    if name in OPTIONS:
        yield from OPTIONS[name](at, name)
    elif (found := as_documented(at, name)) is not None:
        yield {name: found}
    elif width := at.number(f"{name}_dim", f"max_{name}_dim"):
        yield {name: at.floats(TRACE_BATCH, width)}


def beside(
    names: Sequence[str], shape: Shape, needed: Sequence[str]
) -> Iterator[dict[str, Tensor | None]]:
    """Yield what arguments may be beside a first argument of this shape: at last, nothing.

    A mask that must be given may also have values: code reads how long it is.
    """
    for row in dict.fromkeys((shape[:2], (shape[0], shape[-1]))):
        if any(name in BESIDE for name in names):
            found = {name: _beside(name, row) for name in names}
            yield found
            if any(name in BESIDE for name in needed):
                yield {n: t if t is None else torch.ones_like(t, device="cpu")
                       for n, t in found.items()}  # fmt: skip
    yield dict.fromkeys(names)


def _beside(name: str, row: Shape) -> Tensor | None:
    if name not in BESIDE:
        return None
    more, dtype = BESIDE[name]
    return torch.empty(*row, *more, dtype=dtype, device="meta")
