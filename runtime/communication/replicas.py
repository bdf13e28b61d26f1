"""Copies of a split model that share a batch: their gradients are averaged after each backward.

Each copy computes the mean loss of its own sequences, and the mean over copies is that of the whole
batch where all have the same number of tokens that count. Copies may use other parameters (experts
that only some tokens go to), and in another order: so all are averaged at the end, in the order of
the model, those that any copy has a gradient for. Several backward passes before a step stay right,
since what was averaged before is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.mesh import Group


def average_gradients(model: nn.Module, groups: Sequence[Group]) -> None:
    """From now on, average the gradient of each parameter of `model` over each of `groups`."""
    groups = [group for group in groups if group.size > 1]
    if not groups:
        return
    copies = Copies(model, groups)
    copies.watch(model.parameters())
    if (state := model.__dict__.get("_shardwright")) is not None and state.model is not None:
        state.model.copies = copies


class Copies:
    """Which parameters got a gradient in the backward pass that is running.

    Modules that see local tensors of DTensors tell it (`runtime/tensors/to_local.py`), and hooks on
    parameters, for compiled code and for parameters that are plain tensors.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self.model, self.groups = model, groups
        self.hooks: dict[int, Any] = {}
        self.task = -1
        self.made: set[int] = set()

    def watch(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Have hooks on these parameters, which may be new; those that are not trained yet, too."""
        for parameter in parameters:
            if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            if (old := self.hooks.get(id(parameter))) is not None:
                old.remove()
            trained, there = parameter.requires_grad, parameter._post_accumulate_grad_hooks
            parameter.requires_grad_()
            if there is not None:  # `.to()` puts another tensor below, which knows of none
                parameter._post_accumulate_grad_hooks = there
            hook = parameter.register_post_accumulate_grad_hook(self.note)
            self.hooks[id(parameter)] = hook
            parameter.requires_grad_(trained)

    def note(self, parameter: Tensor) -> None:
        """`parameter` gets a gradient."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # what a backward pass that failed has left does not count
            self.task, self.made = task, set()
            Variable._execution_engine.queue_callback(self.average)
        self.made.add(id(parameter))

    def average(self) -> None:
        """Average what any copy has, at the end of a backward pass; all ranks call it."""
        parameters = list(self.model.parameters())
        flags = torch.tensor([id(p) in self.made for p in parameters], dtype=torch.int32)
        flags = flags.to(parameters[0].device)
        for group in self.groups:
            flags = all_reduce(flags, group, "max")
        for i in flags.nonzero().flatten().tolist():
            parameter = parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local = _local(parameter.grad)
            for group in self.groups:
                grad = all_reduce(grad / group.size, group)
            local.copy_(grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return self  # until the copied model has its own


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
