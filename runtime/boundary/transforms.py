"""Refuses torch.func and forward-mode differentiation around a split model."""

from __future__ import annotations

import torch
from torch._C._functorch import (
    peek_interpreter_stack,  # pyright: ignore[reportMissingImports]
)
from torch.autograd import forward_ad

from shardwright.errors import UsageError


def check_no_transform() -> None:
    """Check that no transform of torch.func and no forward-mode differentiation is active.

    Raises:
        UsageError: one is: it wraps each tensor, and ranks cannot exchange wrapped tensors.
    """
    if torch.compiler.is_compiling():
        return
    if peek_interpreter_stack() is not None:
        raise UsageError(
            "torch.func cannot transform a split model, whose ranks exchange tensors on the way: "
            "take gradients by backward() or torch.autograd.grad, and loop over samples"
        )
    if forward_ad._current_level >= 0:
        raise UsageError(
            "forward-mode differentiation of a split model: ranks do not exchange tangents, so "
            "take gradients by backward() or torch.autograd.grad"
        )
