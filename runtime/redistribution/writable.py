"""What functions of autograd give: no views of what nobody else has, so code may write into it.

torch lets nobody write into a view that such a function gave.
"""

from __future__ import annotations

import torch
from torch import Tensor


def writable(made: Tensor, x: Tensor) -> Tensor:
    """`made`, in the forward of a function, of `x`; as no view, unless it is one of `x` itself."""
    if torch.compiler.is_compiling():
        return made
    base = made._base
    if base is None or base is x or base is x._base:
        return made
    return torch.ops.aten._unsafe_view.default(made, made.shape)
