"""`ToLocal`: from a parameter to its local tensor; the gradient gets the same placements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.runtime.communication.replicas import Copies
from shardwright.runtime.redistribution import overlap
from shardwright.runtime.tensors.split_tensor import FromLocal, SplitTensor


class ToLocal(torch.autograd.Function):
    """As `DTensor.to_local`, which takes twice as long."""

    @staticmethod
    def forward(ctx: Any, stored: DTensor, copies: Copies | None) -> Tensor:  # type: ignore[override]
        """Return the local tensor."""
        ctx.spec, ctx.owed = stored._spec, None
        ctx.noted = None if copies is None else (copies, stored)
        local = stored._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[SplitTensor, None]:  # type: ignore[override]
        """Return the gradient as a SplitTensor with the placements of the parameter."""
        spec = ctx.spec
        grad = (grad if ctx.owed is None else overlap.paid(ctx, grad)).contiguous()
        if ctx.noted is not None:
            copies, stored = ctx.noted
            copies.note(stored)
        if torch.is_grad_enabled():  # it will be differentiated again
            return FromLocal.apply(grad, spec), None  # type: ignore[return-value]
        return SplitTensor.__new__(SplitTensor, grad, spec, requires_grad=False), None  # type: ignore[return-value]
