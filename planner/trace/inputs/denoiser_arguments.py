"""What the arguments of denoisers and autoencoders may be: latents, time, prompts, masks, places.

The name of an argument says its kind, and each kind has options in the order in which they are
tried. Widths are guesses at first: a trial says what the layer wants that takes the argument
(`input_trial.py`). An entry of a dict is named `argument.key`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ, TRACE_SOURCE, TRACE_STEP
from shardwright.planner.trace.inputs.subject import Subject

Option = Mapping[str, Any]
"""Values by argument, or by `argument.key`."""

WIDTH = 1
"""The width of a tensor before a layer has said it."""

SIDES = ("sample_size", "sample_height", "image_size")
"""Entries of configs for the height of latents."""

USUAL_SIDE = 48
"""The same, where a config has none: it can be halved four times."""

LENGTHS = ("max_text_seq_length", "text_len", "max_sequence_length")
"""Entries of configs for the number of tokens of a prompt, where it is always the same."""

CHANNELS = ("in_channels", "latent_channels", "num_channels")
PLACES = re.compile(r"axes.*dim|rope_dim|axes_dims")
"""Names of config entries with a number for each coordinate of a token."""

INTS = torch.int64


def sides(at: Subject) -> tuple[int, int]:
    """Return the height and width of latents."""
    for config in at.configs:
        for key in SIDES:
            value = getattr(config, key, None)
            wide = getattr(config, key.replace("height", "width"), value)
            if type(value) is int and type(wide) is int and min(value, wide) > 0:
                return value, wide
            if isinstance(value, (list, tuple)) and [*map(type, value[-2:])] == [int, int]:
                return value[-2], value[-1]
    return USUAL_SIDE, USUAL_SIDE


def _latents(at: Subject, name: str) -> Iterator[Option]:
    """Yield images, tokens, videos with channels or frames first, and waves."""
    high_wide, channels = sides(at), at.number(*CHANNELS) or WIDTH
    yield {name: at.floats(TRACE_BATCH, channels, *high_wide)}
    yield {name: at.floats(TRACE_BATCH, TRACE_SEQ, channels)}
    for frames in dict.fromkeys((TRACE_STEP, _frames(at))):
        yield {name: at.floats(TRACE_BATCH, channels, frames, *high_wide)}
        yield {name: at.floats(TRACE_BATCH, frames, channels, *high_wide)}
    yield {name: at.floats(TRACE_BATCH, channels, at.number("sample_size") or 1024)}


def _frames(at: Subject) -> int:
    """Return how many frames the latents of a video have."""
    frames, ratio = (
        at.number("sample_frames", "num_frames"),
        at.number("temporal_compression_ratio"),
    )
    return ((frames - 1) // (ratio or 1) + 1) if frames else TRACE_STEP


def _numbers(at: Subject, name: str) -> Iterator[Option]:
    """Yield one number for each sample, for each frame of it, and for all."""
    yield {name: _of(TRACE_BATCH)}
    yield {name: _of(TRACE_BATCH, dtype=INTS)}
    yield {name: _of(TRACE_BATCH, _frames(at))}
    yield {name: _of()}


def _vectors(at: Subject, name: str) -> Iterator[Option]:
    yield {name: at.floats(TRACE_BATCH, WIDTH)}
    yield {name: at.floats(TRACE_BATCH, TRACE_SOURCE, WIDTH)}


def _sequences(at: Subject, name: str) -> Iterator[Option]:
    """Yield tokens of a prompt; of several encoders; and one vector."""
    yield {name: at.floats(TRACE_BATCH, TRACE_SOURCE, WIDTH)}
    if length := at.number(*LENGTHS):
        yield {name: at.floats(TRACE_BATCH, length, WIDTH)}
    yield {name: at.floats(TRACE_BATCH, 1, TRACE_SOURCE, WIDTH)}
    yield {name: at.floats(TRACE_BATCH, WIDTH)}


def _masks(at: Subject, name: str) -> Iterator[Option]:
    """Yield masks of prompts, of latents' tokens, and of pixels."""
    rows = [(TRACE_BATCH, TRACE_SOURCE), (TRACE_BATCH, TRACE_SEQ)]
    rows = rows if re.search("encoder|text", name) else rows[::-1]
    for shape in (*rows, (TRACE_BATCH, 1, *sides(at))):
        for dtype in (torch.bool, torch.float32, INTS):
            yield {name: _of(*shape, dtype=dtype)}


def _places(at: Subject, name: str) -> Iterator[Option]:
    """Yield coordinates of each token, as many as the config has parts of a rotation for."""
    found: list[Any] = [
        value
        for config in at.configs
        for key, value in (config.items() if isinstance(config, Mapping) else ())
        if PLACES.search(key) and isinstance(value, (list, tuple))
    ]
    length = TRACE_SOURCE if re.search("txt|text|prompt", name) else TRACE_SEQ
    for count in dict.fromkeys((*map(len, found), 3)):
        yield {name: _of(length, count)}
        yield {name: _of(TRACE_BATCH, length, count)}


def _conditions(at: Subject, name: str) -> Iterator[Option]:
    """Yield what diffusers calls added conditions: none, of texts, of sizes, and of images."""
    texts = at.floats(TRACE_BATCH, WIDTH)
    yield {f"{name}.resolution": None, f"{name}.aspect_ratio": None}
    yield {f"{name}.resolution": _of(TRACE_BATCH, 2), f"{name}.aspect_ratio": _of(TRACE_BATCH, 1)}
    yield {f"{name}.text_embeds": texts, f"{name}.time_ids": _of(TRACE_BATCH, 6)}
    yield {f"{name}.image_embeds": at.floats(TRACE_BATCH, WIDTH)}
    yield {f"{name}.text_embeds": texts, f"{name}.image_embeds": at.floats(TRACE_BATCH, WIDTH)}


def _of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


KINDS: tuple[tuple[str, Callable[[Subject, str], Iterable[Option]]], ...] = (
    (r"^added_cond_kwargs$", _conditions),
    (r"controlnet|residual|kv_cache", lambda at, name: ()),
    (r"mask", _masks),
    # How many frames, rows and columns the tokens of latents are: all are in one row.
    (r"^width$", lambda at, name: [{name: TRACE_SEQ}]),
    (r"^(num_frames|height)$", lambda at, name: [{name: 1}]),
    (r"_size$|crop|target_size", lambda at, name: [{name: _of(TRACE_BATCH, 2)}]),
    (r"_ids$|_ids_|rope_pos", _places),
    (r"class_labels|token_type|style", lambda at, name: [{name: _of(TRACE_BATCH, dtype=INTS)}]),
    (r"time|sigma|^t$|guidance$|^fps$|^ofs$|noise", _numbers),
    (r"pool|proj_embed|global_hidden", _vectors),
    (r"encoder_hidden|embed|feats|text|clip|context", _sequences),
)
"""Pattern of names -> what such an argument may be; the first that fits. Others are unknown."""


def options(at: Subject, name: str) -> list[Option]:
    """Return what an argument may be, likeliest first; nothing if its name says nothing.

    The first argument of a forward is what is denoised or encoded.
    """
    if name == next(iter(at.names), None):
        return [*_latents(at, name)]
    return next(([*make(at, name)] for text, make in KINDS if re.search(text, name)), [])
