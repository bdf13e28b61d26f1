"""Attention with queries sharded along the sequence, so that each rank computes some of the rows.

A module's own code computes keys and values with positions, and no module boundary separates that
code from the call of attention. The call of attention is therefore also a place where tensors may
be resharded: the trace has markers before it, and the runtime reshards there
(`runtime/rows/attention_rows.py`). The runtime also makes causal masks for the rows of each rank,
so the trace has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.planner.graph.graph import ATTENDS
from shardwright.planner.trace.record.boundaries import BOUNDARY

torch.library.define(
    "shardwright::attention_rows",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool enable_gqa=False)"
    " -> Tensor",
)
ROWS = torch.ops.shardwright.attention_rows.default

OPERANDS = ("query", "key", "value", "attn_mask")
"""Tensor arguments of `scaled_dot_product_attention` in order: the slots of the markers."""


@torch.library.impl("shardwright::attention_rows", "CompositeImplicitAutograd")
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=enable_gqa)


def by_rows(
    module: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `ROWS`, with markers, for a call of attention in `module`."""
    given = dict(zip(OPERANDS, args, strict=False)) | dict(kwargs)
    marked = {
        slot: BOUNDARY(given[slot], f"{module}|{ATTENDS}|{slot}")
        for slot in OPERANDS
        if given.get(slot) is not None
    }
    return tuple(map(marked.get, OPERANDS)), {"enable_gqa": given.get("enable_gqa", False)}
