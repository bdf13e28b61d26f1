"""`SplitRows`: an output of which a rank of `cp` sees its own rows of the sequence."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.logits.split_logits import SealedLogitsError, SplitLogits
from shardwright.runtime.slots import StandsForTensor


class RowShare(NamedTuple):
    """Which rows of a sequence this rank has. `lengths` are the numbers of rows of all ranks."""

    group: Group
    lengths: tuple[int, ...]

    @property
    def whole(self) -> int:
        """The length of the full sequence."""
        return sum(self.lengths)

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return sum(self.lengths[: self.group.rank])

    @property
    def stop(self) -> int:
        """The row after the last of this rank."""
        return self.start + self.lengths[self.group.rank]

    def joined(self, x: Tensor) -> Tensor:
        """All-gather the rows, in rank order: [batch, own, ...] -> [batch, whole, ...]."""
        rest = [0, 0] * (x.dim() - 2)
        every = all_gather(F.pad(x, (*rest, 0, max(self.lengths) - x.shape[1])), self.group)
        pairs = zip(every, self.lengths, strict=True)
        return torch.cat([part[:, :length] for part, length in pairs], 1)


class _TakeRows(torch.autograd.Function):
    """From a replicated tensor to a rank's rows; the backward pass gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RowShare) -> Tensor:  # type: ignore[override]
        ctx.share = share
        return x[:, share.start : share.stop].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.share.joined(grad.contiguous()), None


class SplitRows(StandsForTensor):
    """This rank's rows of an output [batch, sequence, ...]; not a tensor.

    `local` is [batch, rows of this rank, ...], also with local classes if the vocabulary is
    sharded. `whole()` is the full output; all ranks must call it. A loss that is computed from
    `local` is a term of the sum over all ranks, and all ranks must run its backward pass.
    """

    def __init__(self, output: Tensor | SplitLogits, share: RowShare) -> None:
        self._output, self._share = output, share

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        part = self._output.local if isinstance(self._output, SplitLogits) else self._output
        return _TakeRows.apply(part, self._share)

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of this rank, and the row after its last, in the full sequence."""
        return self._share.start, self._share.stop

    def whole(self) -> Tensor:
        """The full output on each rank; a loss of it is the same on all ranks."""
        return self._output.whole() if isinstance(self._output, SplitLogits) else self._output

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'SplitRows' has no attribute '{name}'")
        raise SealedLogitsError(
            f"'{name}' of what ranks have rows of: take `.local`, this rank's, or call `.whole()` "
            "on all ranks"
        )

    def __repr__(self) -> str:
        start, stop = self.rows
        return f"SplitRows(rows {start} to {stop} of {self._share.whole})"
