"""A module that uses the op, and what it becomes where ranks share its weight."""

import torch
from torch import Tensor, nn

from shardwright.runtime.boundary.module_class import LocalModule
from shardwright_example.ops import gated


class Gate(nn.Module):
    """Shapes: [..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return gated(x, self.weight)


class LocalGate(Gate):
    """The same on this rank's part of the weight."""

    channels = 0

    def set_up(self) -> None:
        """Called when the weight is in place."""
        self.channels = len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.channels
        return gated(x, self.weight)


class ParallelGate(LocalModule, LocalGate):
    """A gate split by channels."""
