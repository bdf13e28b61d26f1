"""Outputs of which a rank of `cp` is shown its own rows of the sequence."""

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


class Share(NamedTuple):
    """Which rows of a sequence a rank has: those from `start` to `stop`; `lengths` by rank."""

    group: Group
    lengths: tuple[int, ...]

    @property
    def whole(self) -> int:
        """The length of the whole."""
        return sum(self.lengths)

    @property
    def start(self) -> int:
        """The first row."""
        return sum(self.lengths[: self.group.rank])

    @property
    def stop(self) -> int:
        """Behind the last one."""
        return self.start + self.lengths[self.group.rank]

    def joined(self, x: Tensor) -> Tensor:
        """The rows of all ranks, in their order: [batch, own, ...] -> [batch, whole, ...]."""
        rest = [0, 0] * (x.dim() - 2)
        every = all_gather(F.pad(x, (*rest, 0, max(self.lengths) - x.shape[1])), self.group)
        pairs = zip(every, self.lengths, strict=True)
        return torch.cat([part[:, :length] for part, length in pairs], 1)


class _Own(torch.autograd.Function):
    """A rank's rows of what all ranks have whole; the gradient of the whole is that of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:  # type: ignore[override]
        ctx.share = share
        return x[:, share.start : share.stop].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.share.joined(grad.contiguous()), None


class SplitRows(StandsForTensor):
    """This rank's rows of an output [batch, sequence, ...]; not a tensor.

    `local` is [batch, rows of this rank, ...], with its own classes where a vocabulary is split as
    well; `whole()` is all of it, which all ranks must call for together. A loss that is computed
    of `local` counts as the sum of those of all ranks, and all must take its gradient.
    """

    def __init__(self, output: Tensor | SplitLogits, share: Share) -> None:
        self._output, self._share = output, share

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        part = self._output.local if isinstance(self._output, SplitLogits) else self._output
        return _Own.apply(part, self._share)

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of this rank, and the one behind its last, in the whole sequence."""
        return self._share.start, self._share.stop

    def whole(self) -> Tensor:
        """The whole on each rank; a loss of it is the same on all ranks."""
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
