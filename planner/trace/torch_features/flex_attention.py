"""Trace `flex_attention` as the ops that it stands for, with its mask and score functions.

Its functions get the numbers of the batch entry, head, query and key. In the trace these are an
`arange` of a dim, for heads a running sum along them. If a function depends on the number of a
head, heads cannot be sharded: a rank would number its heads from 0. All other functions do the same
for the heads of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from shardwright.planner.trace.thread_patches import Patch


def _without_blocks(
    masks: tuple[Tensor, None], mask_mod: Any, lengths: tuple[int, int], queries: int, keys: int
) -> flex.BlockMask:
    """Return a block mask with the sizes of the real one, but without knowing what is masked.

    It is on meta, as queries are, also if code makes it on the CPU, where it will run.
    """
    batch, heads, rows, columns = masks[0].shape
    down, across = -(-int(rows) // queries), -(-int(columns) // keys)
    empty = partial(masks[0].new_empty, dtype=torch.int32, device="meta")
    counts, indices = empty((batch, heads, down)), empty((batch, heads, down, across))
    return flex.BlockMask(
        lengths, counts, indices, None, None, None, None, None, None, (queries, keys), mask_mod
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's `flex_attention_hop` returns: output, logsumexp and greatest scores."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) if heads > 1 else x for x in (key, value))
    scores = (query.to(precise) @ key.to(precise).transpose(-2, -1)) * scale
    sizes = (scores.shape[dim] for dim in (0, 2, 3))
    batch, queries, keys = (torch.arange(n, device=scores.device) for n in sizes)
    # A size given to `arange` must not change, also if no function uses the numbers.
    head = torch.ones_like(scores[0, :, 0, 0], dtype=torch.int64).cumsum(0) - 1
    numbers = batch, head, queries, keys
    counts = block_mask[2]
    with TransformGetItemToIndex():
        seen = flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*numbers)
        scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *numbers)
    if any(n > 1 for n in counts.shape[:2]):  # sizes of the mask are those of the queries
        seen = seen & (counts[:, :, :1, None] == counts[:, :, :1, None])
    scores = scores.to(precise).masked_fill(~seen, -torch.inf)
    weights = torch._safe_softmax(scores, dim=-1)
    output = weights.to(query.dtype) @ value.to(query.dtype)
    return output, scores.logsumexp(-1) / LN2, scores.amax(-1) / LN2


LN2 = 0.6931471805599453

PATCHES: list[Patch] = [
    (flex, "_convert_mask_to_block_mask", lambda mask, *_, **__: (mask, None)),  # undivided
    (flex, "_create_sparse_block_from_block_mask", _without_blocks),
    (flex, "flex_attention_hop", attend),
    (flex, "_validate_device", lambda *_: None),  # meta, too
]
"""What `flex_attention` and `create_block_mask` call in a trace, so that it has plain ops."""
