"""Averages gradients over copies of a split model that share a batch, after each backward pass.

Each copy computes the mean loss of its own sequences. The mean over copies is the mean of the full
batch if all copies have equally many tokens that count. Copies may use different parameters
(experts that only some tokens reach), in a different order. At the end of a backward pass, all
copies therefore average every parameter that any of them has a gradient for, in model order.
An expert that one rank of `ep` holds gets the sum of the gradients of all their tokens: it is
divided as it comes, and averaged over the other dims.
Several backward passes before a step stay correct: what was averaged before is equal on all ranks,
and what is divided is not yet added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.mesh import Group


def average_gradients(model: nn.Module, groups: Mapping[str, Group]) -> None:
    """Average the gradient of each parameter of `model` over each of `groups` from now on.

    `groups` has the ranks that share a batch, by mesh dim.
    """
    groups = {name: group for name, group in groups.items() if group.size > 1}
    if not groups:
        return
    copies = Copies(model, groups)
    copies.watch(model.parameters())
    if (state := model.__dict__.get("_shardwright")) is not None and state.model is not None:
        state.model.copies = copies


class Copies:
    """Tracks which parameters got a gradient in the current backward pass.

    Modules that see local tensors of DTensors report it (`ToLocal` in
    `runtime/tensors/split_tensor.py`). Hooks on parameters report it for compiled code and for
    parameters that are plain tensors.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, Group]) -> None:
        self.model, self.groups = model, groups
        self.hooks: dict[int, list[Any]] = {}
        self.task = -1
        self.made: set[int] = set()

    def watch(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Hook these parameters, including new ones and those that are not trained yet."""
        for parameter in parameters:
            if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            for old in self.hooks.get(id(parameter), ()):
                old.remove()
            trained, there = parameter.requires_grad, parameter._post_accumulate_grad_hooks
            parameter.requires_grad_()
            if there is not None:  # `.to()` swaps the tensor underneath, which has no hooks
                parameter._post_accumulate_grad_hooks = there
            hooks: list[Any] = [parameter.register_post_accumulate_grad_hook(self.note)]
            if not isinstance(parameter, DTensor) and (ranks := self.ranks_apart(parameter)) > 1:
                hooks.append(parameter.register_hook(lambda grad, ranks=ranks: grad / ranks))
            self.hooks[id(parameter)] = hooks
            parameter.requires_grad_(trained)

    def note(self, parameter: Tensor) -> None:
        """Record that `parameter` gets a gradient."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # drops what a failed backward pass left
            self.task, self.made = task, set()
            Variable._execution_engine.queue_callback(self.average)
        self.made.add(id(parameter))

    def ranks_apart(self, parameter: Tensor) -> int:
        """Return how many copies hold different parts of `parameter`, 1 if all hold the same."""
        return prod(self.groups[name].size for name in self.groups.keys() & _apart(parameter))

    def average(self) -> None:
        """Average all gradients that any copy has. Runs on all ranks at the end of a backward."""
        parameters = list(self.model.parameters())
        flags = torch.tensor([id(p) in self.made for p in parameters], dtype=torch.int32)
        flags = flags.to(parameters[0].device)
        for group in self.groups.values():
            flags = all_reduce(flags, group, "max")
        for i in flags.nonzero().flatten().tolist():
            parameter = parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local = _local(parameter.grad)
            apart = _apart(parameter)
            for name, group in self.groups.items():
                if name not in apart:
                    grad = all_reduce(grad / group.size, group)
            local.copy_(grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return self  # until the copied model gets its own


def _apart(parameter: Tensor) -> set[str]:
    """Return the mesh dims over which ranks hold different parts of `parameter`."""
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        placed = zip(names, parameter.placements, strict=True)
        return {name for name, placement in placed if not placement.is_replicate()}
    placement = getattr(parameter, "shardwright_placement", None)
    return set() if placement is None else {*placement.meshes}


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
