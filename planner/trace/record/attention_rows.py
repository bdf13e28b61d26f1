"""Attention whose queries may be a part of the sequence, as ranks that share one compute it.

Keys and values are made in the module's own code, with positions in them, and no module's boundary
is between that and the call of attention. So that call is a place where tensors change their
placement, too: the trace has markers before it, and the runtime acts there
(`runtime/rows/attention_rows.py`). Causal masks are made there for the rows of each rank, so in the
trace there is none.
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
"""Of `scaled_dot_product_attention`, in its order: the slots of the markers."""


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
    """The arguments of `ROWS`, behind markers, for a call of attention in `module`."""
    given = dict(zip(OPERANDS, args, strict=False)) | dict(kwargs)
    marked = {
        slot: BOUNDARY(given[slot], f"{module}|{ATTENDS}|{slot}")
        for slot in OPERANDS
        if given.get(slot) is not None
    }
    return tuple(map(marked.get, OPERANDS)), {"enable_gqa": given.get("enable_gqa", False)}
