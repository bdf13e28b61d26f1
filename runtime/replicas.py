"""Copies of a split model that share a batch: their gradients are averaged after each backward.

Each copy computes the mean loss of its own sequences, and the mean over copies is that of the whole
batch where all have the same number of tokens that count. Copies may use other parameters (experts
that only some tokens go to), and in another order: so all are averaged at the end, in the order of
the model, those that any copy has a gradient for. Several backward passes before a step stay right,
since what was averaged before is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from shardwright.runtime.collectives import all_reduce
from shardwright.runtime.mesh import Group


def average_gradients(model: nn.Module, groups: Sequence[Group]) -> None:
    """From now on, average the gradient of each parameter of `model` over each of `groups`."""
    groups = [group for group in groups if group.size > 1]
    trained = [p for p in model.parameters() if p.requires_grad] if groups else []
    averaging = _Averaging(trained, groups)
    for i, parameter in enumerate(trained):
        parameter.register_post_accumulate_grad_hook(averaging.hook(i))


class _Averaging:
    """Which parameters got a gradient in the backward pass that is running."""

    def __init__(self, trained: Sequence[nn.Parameter], groups: Sequence[Group]) -> None:
        self.trained, self.groups = trained, groups
        self.task = -1
        self.made: set[int] = set()

    def hook(self, i: int) -> Callable[[Tensor], None]:
        """What notes that parameter number `i` got a gradient."""

        def note(_: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if task != self.task:  # what a backward pass that failed has left does not count
                self.task, self.made = task, set()
                Variable._execution_engine.queue_callback(self.average)
            self.made.add(i)

        return note

    def average(self) -> None:
        """Average what any copy has, at the end of a backward pass; all ranks call it."""
        flags = torch.zeros(len(self.trained), dtype=torch.int32)
        flags[list(self.made)] = 1
        flags = flags.to(self.trained[0].device)
        for group in self.groups:
            flags = all_reduce(flags, group, "max")
        for i in flags.nonzero().flatten().tolist():
            parameter = self.trained[i]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local = _local(parameter.grad)
            for group in self.groups:
                grad = all_reduce(grad / group.size, group)
            local.copy_(grad)


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
