"""The paged cache of transformers' continuous batching, as a call of it is traced.

Continuous batching puts tokens of several requests into one row. Attention gets a `cache` argument:
it writes the new keys and values to rows of it, and reads the rows of all tokens of the requests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.contract.names import EAGER, PAGED_CACHES, PAGED_EAGER

KERNEL_LENGTHS = ("max_length_q", "max_length_k")
"""Integers beside a paged cache that vary from call to call. In a traced call no code reads them;
only kernels of flash attention do."""

ROWS = 41
"""Rows of a traced cache: a prime, as all sizes of a trace."""


def is_paged(value: Any) -> bool:
    """Whether `value` is a paged cache."""
    return type(value).__name__ in PAGED_CACHES


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Inside, attention of `model` reads a paged cache, as continuous batching sets it."""
    named = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    eager = [c for c in named.values() if getattr(c, "_attn_implementation", None) == EAGER]
    try:
        for config in eager:
            config._attn_implementation = PAGED_EAGER
        yield
    finally:
        for config in eager:
            config._attn_implementation = EAGER


def attention_kinds(model: Any) -> list[str]:
    """The kinds of attention of `model`, each of which has an index and a mask.

    Raises:
        ValueError: continuous batching does not know one of them.
    """
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    return [*group_layers_by_attn_type(model.config.get_text_config())]


def batch_arguments(
    kinds: Sequence[str],
    *,
    tokens: int,
    read: int,
    requests: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Any]:
    """Arguments of a call of continuous batching with zeros, but for the cache and kernel lengths.

    Args:
        kinds: The kinds of attention of the model.
        tokens: The number of tokens of all requests.
        read: The number of rows of the cache that are read.
        requests: The number of requests.
        dtype: The dtype of masks.
        device: The device of all tensors.
    """

    def integers(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    masks = {kind: torch.zeros(1, 1, tokens, read, dtype=dtype, device=device) for kind in kinds}
    return {
        "input_ids": integers(1, tokens),
        "position_ids": integers(1, tokens),
        "attention_mask": masks if len(kinds) > 1 else masks[kinds[0]],
        "cu_seq_lens_q": integers(requests + 1),
        "cu_seq_lens_k": {kind: integers(requests + 1) for kind in kinds},
        "logits_indices": integers(requests),
        "logits_processor_args": integers(1, requests),
        "read_index": [integers(read) for _ in kinds],
        "write_index": [integers(tokens) for _ in kinds],
        "use_cache": False,
        "is_causal": False,
    }


def traced_cache(model: Any) -> Any:
    """An empty cache that stands for the paged cache of `model`, of transformers."""
    from transformers.generation.continuous_batching.utils import find_head_dim

    return _traced_class()(find_head_dim(model.config.get_text_config()))


@functools.cache
def _traced_class() -> type:
    """The class of `TracedPagedCache`, made when transformers is needed."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    class TracedPagedCache(PagedAttentionCache):
        """Writes and reads keys and values as a `PagedAttentionCache`, with one page.

        It makes its tensors from the keys and values that it is given, so that each has the heads
        of the rank.

        Args:
            width: The width of a head.
        """

        def __init__(self, width: int) -> None:
            self.width = width
            self.kept: dict[int, tuple[Tensor, Tensor]] = {}

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            kwargs: Mapping[str, Any],
        ) -> tuple[Tensor, Tensor]:
            """Write keys and values [1, heads, tokens, head dim]; return those of all rows read.

            Raises:
                ValueError: a paged cache cannot hold them.
            """
            widths = [int(x.shape[-1]) for x in (key_states, value_states)]
            if widths != [self.width] * 2:
                raise ValueError(
                    f"keys and values have heads of {widths[0]} and {widths[1]}, and a paged cache "
                    f"has heads of {self.width}"
                )
            new = [x.squeeze(0).transpose(0, 1) for x in (key_states, value_states)]
            keys, values = (x.new_zeros(ROWS, *x.shape[1:]) for x in new)
            kept = self.kept.setdefault(int(layer_idx), (keys, values))
            for rows, x in zip(kept, new, strict=True):
                rows.index_copy_(0, kwargs["write_index"][0], x)
            read = (rows.index_select(0, kwargs["read_index"][0]) for rows in kept)
            keys, values = (x.transpose(0, 1).unsqueeze(0) for x in read)
            return keys, values

    return TracedPagedCache
