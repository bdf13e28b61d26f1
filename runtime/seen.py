"""How modules see parameters that are DTensors: as local tensors while they compute.

Outside of any forward `module.weight` is the DTensor, so what one computes of it there is of the
whole weight. Within the forward of a module of the model it is the local tensor, whose gradient
comes back as a DTensor laid out as the parameter is. For that each module that has parameters or
modules gets a class in front of its own, and the modules of one model share a `Depth`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.classes import like


class Depth:
    """How many forwards of one model's modules are running, within each other."""

    def __init__(self, axes: int) -> None:
        self.now = 0
        self.axes = axes
        """Dims of the mesh of parameters: FSDP2 stores them over more."""


class _Local(torch.autograd.Function):
    """The local tensor of a parameter. Does what `to_local` does, which takes twice as long."""

    @staticmethod
    def forward(ctx: Any, stored: DTensor) -> Tensor:  # type: ignore[override]
        """The local tensor."""
        ctx.spec = stored._spec
        local = stored._local_tensor
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # type: ignore[override]
        """The gradient, laid out as the parameter is."""
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False)


def _part(stored: Any, depth: Depth, owner: nn.Module, name: str) -> Tensor:
    """What the code of `owner` computes with where its parameter `name` is `stored`."""
    if not isinstance(stored, DTensor):
        raise UsageError(
            f"the parameter '{name}' of a {type(owner).__name__} was replaced after the model was "
            "split: change its values in place, or change the model before it is split"
        )
    if len(stored.placements) != depth.axes:
        return stored  # FSDP2 has it, and reads it
    if torch.compiler.is_compiling():
        return stored.to_local()
    if stored.requires_grad and torch.is_grad_enabled():
        return _Local.apply(stored)  # type: ignore[return-value]
    return stored._local_tensor


def _seen(name: str) -> property:
    """The parameter `name`, through its use where the plan has one."""

    def get(self: Any) -> Any:
        stored = self._parameters.get(name, self)
        if stored is self:  # DDP over a submesh keeps it so while it computes
            stored = self.__dict__.get(name, self)
            if stored is self:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        depth = self._shardwright_depth
        if stored is None or not (depth.now or torch.compiler.is_compiling()):
            return stored
        local = _part(stored, depth, self, name)
        state = self.__dict__.get("_shardwright")
        use = None if state is None else state.uses.get(name)
        return local if use is None else use(local)

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def drop(self: Any) -> None:
        del self.__dict__[name]

    return property(get, put, drop, f"`{name}` as the code that asks should see it.")


def _flat_weights(self: Any) -> list[Tensor]:
    return [getattr(self, name, None) for name in self._flat_weights_names]  # type: ignore[misc]


class Seeing:
    """Mixin in front of a module's class: its parameters are local while a forward runs."""

    _shardwright_depth: Depth

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        depth = self._shardwright_depth
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        depth.now += 1
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            depth.now -= 1


@functools.cache
def seeing_class(original: type, names: tuple[str, ...]) -> type:
    """`original` with the parameters `names` seen as local ones."""
    members: dict[str, Any] = {name: _seen(name) for name in names}
    if original.forward is not nn.Module.forward:  # type: ignore[attr-defined]
        members["forward"] = like(original, Seeing.forward)
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    for name in ("__doc__", "__module__", "__qualname__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (Seeing, original), members)


def see_locals(model: nn.Module, parameters: dict[int, nn.Parameter], axes: int) -> None:
    """Put `parameters`, by the id of what was there, in place, and let modules see local ones."""
    depth = Depth(axes)
    for module in list(model.modules()):
        names = [n for n, p in module._parameters.items() if p is not None]
        if not names and not module._modules:
            continue
        for name in names:
            module._parameters[name] = parameters[id(module._parameters[name])]
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)
        module._shardwright_depth = depth  # type: ignore[assignment]
        module.__class__ = seeing_class(type(module), tuple(names))
