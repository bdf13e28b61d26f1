"""Values attached to tensors on meta, and the buffers among these that are one number."""

from __future__ import annotations

import torch


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value attached to a tensor, or None."""
    return getattr(tensor, "shardwright_value", None)


def number_of(buffer: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a buffer that is one integer, which no checkpoint holds, or None.

    Code computes lengths with it, as with an integer in a plain attribute.
    """
    value = value_of(buffer)
    return value if value is not None and not value.dim() and value.dtype != torch.bool else None
