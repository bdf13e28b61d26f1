"""The call of continuous batching: tokens of several requests in one row, with a paged cache.

The arguments are those that `ContinuousBatchingManager` of transformers gives. One call stands for
all: rows that it writes and rows that it only reads are in one tensor, so they are placed alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.names import EAGER, PAGED
from shardwright.planner.graph.trace_sizes import TRACE_REQUESTS, TRACE_SEQ, TRACE_SOURCE
from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.inputs.subject import floating_dtype
from shardwright.planner.trace.runs.run import Run
from shardwright.runtime.calls.paged import KERNEL_LENGTHS, attention_kinds, batch_arguments

BATCHES = "init_continuous_batching"
"""The method of models that can batch continuously."""


ATTENTION_OF_OPS = (EAGER, "sdpa")
"""Attention of transformers that is code of torch's ops, also with a paged cache."""


class NotRead(dict[str, Any]):
    """Stands for integers that only kernels read."""

    def __getitem__(self, key: str) -> Any:
        raise Unproven("its code reads lengths that are meant for kernels of flash attention")

    def get(self, key: str, default: Any = None) -> Any:
        """Refuse to be read."""
        return self[key]


def batched_call(module: nn.Module) -> Run:
    """Return a call of `module` that writes to a paged cache and reads from it.

    Raises:
        ModelError: transformers has no continuous batching for `module`.
    """
    config: Any = getattr(module, "config", None)
    if not hasattr(module, BATCHES):
        raise ModelError(f"{type(module).__name__} has no {BATCHES}: it cannot batch continuously")
    try:
        kinds = attention_kinds(module)
    except ValueError as error:
        raise ModelError(f"transformers cannot batch this model continuously: {error}") from error
    attention = config._attn_implementation
    if attention not in ATTENTION_OF_OPS:
        raise ModelError(
            f"the attention of {type(module).__name__} is '{attention}', and continuous batching "
            f"is proven for {' and '.join(ATTENTION_OF_OPS)}: plan without continuous_batching"
        )
    given = batch_arguments(
        kinds,
        tokens=TRACE_SEQ,
        read=TRACE_SOURCE,
        requests=TRACE_REQUESTS,
        dtype=floating_dtype(module),
        device="meta",
    )
    given |= {name: NotRead() for name in KERNEL_LENGTHS}
    selects: Any = getattr(module, "_supports_logits_to_keep", bool)
    if selects():
        given["logits_to_keep"] = torch.empty_like(given["logits_indices"])
    return Run("", (), given, priced=False, fills=PAGED, batched=True, given=True)
