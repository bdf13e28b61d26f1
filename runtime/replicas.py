"""Copies of a split model that share a batch: their gradients are averaged as they are made.

Each copy computes the mean loss of its own sequences, and the mean over copies is that of the whole
batch where all have the same number of tokens that count. A hook on each parameter averages its
gradient once it is accumulated; several backward passes before a step stay right, since what was
averaged before is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shardwright.runtime.collectives import all_reduce
from shardwright.runtime.mesh import Group


def average_gradients(model: nn.Module, groups: Sequence[Group]) -> None:
    """From now on, average the gradient of each parameter of `model` over each of `groups`."""
    groups = [group for group in groups if group.size > 1]

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad
        for group in groups:
            grad = all_reduce(grad / group.size, group)
        parameter.grad = grad

    for parameter in model.parameters() if groups else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
