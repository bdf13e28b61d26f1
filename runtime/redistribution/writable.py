"""Returns fresh results of autograd functions as plain tensors instead of views.

Torch does not let code write in place into a view that an autograd function returned.
"""

from __future__ import annotations

import torch
from torch import Tensor


def writable(made: Tensor, x: Tensor) -> Tensor:
    """Return `made`, a function's result for `x`, as a non-view unless it is a view of `x`."""
    if torch.compiler.is_compiling():
        return made
    base = made._base
    if base is None or base is x or base is x._base:
        return made
    return torch.ops.aten._unsafe_view.default(made, made.shape)
