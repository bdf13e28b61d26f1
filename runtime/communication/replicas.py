"""Averages gradients over copies of a split model that share a batch, after each backward pass.

Each copy computes the mean loss of its own sequences. The mean over copies is the mean of the full
batch if all copies have equally many tokens that count. Copies may use different parameters
(experts that only some tokens reach), in a different order. At the end of a backward pass, all
copies therefore average every parameter that any of them has a gradient for. Gradients of one kind
are averaged together, in buckets that are the same on all ranks, as each all-reduce has a latency.
An expert that one rank of `ep` holds gets the sum of the gradients of all their tokens: it is
divided as it comes, and averaged over the other dims.
Several backward passes before a step stay correct: what was averaged before is equal on all ranks,
and what is divided is not yet added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import EP
from shardwright.planner.contract.transitions import buckets
from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.mesh import Group, Mesh


def average_gradients(
    model: nn.Module, mesh: Mesh, dims: Iterable[str], apart: Iterable[Tensor] = ()
) -> None:
    """Average the gradient of each parameter of `model` over mesh dims from now on.

    All ranks call it. The ranks of `dims` share a batch. `apart` are other tensors of the model
    that may be trained.
    """
    dims = [name for name in dims if mesh[name].size > 1]
    if not dims:
        return
    copies = Copies(model, mesh, dims, apart)
    copies.watch(copies.parameters())
    if (state := model.__dict__.get("_shardwright")) is not None and state.model is not None:
        state.model.copies = copies


class _Pass:
    """Ids of parameters in a backward pass."""

    def __init__(self) -> None:
        self.made: set[int] = set()
        """Those with a gradient."""
        self.expected: set[int] = set()
        """Those of which a hook must say that it has arrived."""
        self.arrived: set[int] = set()


class Copies:
    """Tracks which parameters got a gradient in each backward pass under way.

    Hooks on parameters report it. Modules that see local tensors of DTensors report gradients that
    are to come (`ToLocal` in `runtime/tensors/split_tensor.py`): one that no hook then reports went
    elsewhere, and is not averaged. A backward pass may run others inside of it (reentrant gradient
    checkpointing).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, dims: Sequence[str], apart: Iterable[Tensor]
    ) -> None:
        self.model, self.mesh, self.groups = model, mesh, {name: mesh[name] for name in dims}
        for each in (dims, {*dims} - {EP}):
            mesh.over(each)  # makes the groups now, and not in a backward pass
        self.apart: Any = [tensor for tensor in apart if tensor.is_leaf and tensor.requires_grad]
        self.hooks: dict[int, list[Any]] = {}
        self.passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()

    def parameters(self) -> list[nn.Parameter]:
        """Return what is averaged."""
        return [*self.model.parameters(), *self.apart]

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

    def expect(self, parameter: Tensor) -> None:
        """Record that a backward pass has computed a gradient of `parameter`."""
        done = self._pass()
        done.made.add(id(parameter))
        # FSDP2's own parameters for a pass are neither: it averages their gradients.
        averaged = self._hooks_of(parameter)[0] or not isinstance(parameter, nn.Parameter)
        if averaged and parameter.is_leaf:
            done.expected.add(id(parameter))

    def note(self, parameter: Tensor) -> None:
        """Record that `parameter` has got a gradient.

        Raises:
            UsageError: code of others would see it before it is averaged.
        """
        if self._hooks_of(parameter)[1]:
            raise UsageError(
                "a hook behind the accumulation of a gradient would see that of this copy of the "
                "model, as copies average their gradients when a backward pass ends: do after "
                "backward() what the hook does, or plan without copies (dp)"
            )
        done = self._pass()
        done.made.add(id(parameter))
        done.arrived.add(id(parameter))

    def _hooks_of(self, parameter: Tensor) -> tuple[set[int], set[int]]:
        """Ids of own hooks behind the accumulation of a gradient, and of those of others."""
        there = {*(parameter._post_accumulate_grad_hooks or ())}
        own = {hook.id for hook in self.hooks.get(id(parameter), ())}
        return there & own, there - own

    def _pass(self) -> _Pass:
        """The current backward pass. Only its callback holds it: one that fails leaves nothing."""
        task = torch._C._current_graph_task_id()
        found = self.passes.get(task)
        if found is None:
            found = self.passes[task] = _Pass()
            Variable._execution_engine.queue_callback(partial(self.average, found))
        return found

    def ranks_apart(self, parameter: Tensor) -> int:
        """Return how many copies hold different parts of `parameter`, 1 if all hold the same."""
        return prod(self.groups[name].size for name in self.groups.keys() & _apart(parameter))

    def average(self, done: _Pass) -> None:
        """Average all gradients that any copy has. Runs on all ranks at the end of a backward.

        Raises:
            UsageError: a gradient went elsewhere.
        """
        if not done.expected <= done.arrived:
            raise UsageError(
                "torch.autograd.grad, or tensors in place of the parameters of a model with copies "
                "(dp): gradients would be those of this copy's part of the batch. Call backward(), "
                "which averages over copies, and read .grad of the model's own parameters; or give "
                "create_graph=True, if a loss of this copy is made of the gradient"
            )
        parameters = self.parameters()
        flags = torch.tensor([id(p) in done.made for p in parameters], dtype=torch.int32)
        flags = flags.to(parameters[0].device)
        flags = all_reduce(flags, self.mesh.over(self.groups), "max")
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for i in flags.nonzero().flatten().tolist():
            parameter = parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad, dims = _local(parameter.grad), frozenset(self.groups.keys() - _apart(parameter))
            kinds.setdefault((dims, grad.dtype, grad.device), []).append(grad)
        for (dims, *_), grads in kinds.items():
            for bucket in buckets([grad.nbytes for grad in grads]):
                _average([grads[i] for i in bucket], self.mesh.over(dims))

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


@torch.no_grad()
def _average(grads: Sequence[Tensor], group: Group) -> None:
    """Average gradients of one kind over a group, in place: a single one without a copy."""
    if group.size == 1:
        return
    if len(grads) == 1:
        (grad,) = grads
        if (found := all_reduce(grad.div_(group.size), group, spent=True)) is not grad:
            grad.copy_(found)
        return
    sizes = [grad.numel() for grad in grads]
    flat = grads[0].new_empty(sum(sizes))
    for grad, part in zip(grads, flat.split(sizes), strict=True):
        torch.div(grad, group.size, out=part.view_as(grad))
    flat = all_reduce(flat, group, spent=True)
    for grad, part in zip(grads, flat.split(sizes), strict=True):
        grad.copy_(part.view_as(grad))
