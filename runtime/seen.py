"""How modules see parameters that are DTensors: as local tensors while they compute.

Outside of any forward `module.weight` is the DTensor, so what one computes of it there is of the
whole weight. Within the forward of a module of the model it is the local tensor, whose gradient
comes back as a DTensor laid out as the parameter is. For that each module that has parameters or
modules gets a class in front of its own, and the modules of one model share a `Depth`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.classes import like
from shardwright.runtime.dtensors import axes_of, cut
from shardwright.runtime.mesh import Mesh


class Depth:
    """How many forwards of one model's modules are running, within each other."""

    def __init__(self, mesh: Mesh) -> None:
        self.now = 0
        self.mesh = mesh
        self.axes = len(axes_of(mesh))
        """Dims of the mesh of parameters: FSDP2 stores them over more."""

    def cut(self, value: Tensor, stored: DTensor) -> Tensor:
        """What this rank holds of `value`, laid out as `stored`; a DTensor stays as it is."""
        return value if isinstance(value, DTensor) else cut(value, stored, self.mesh)


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

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__["_parameters"]:
            raise UsageError(
                f"the parameter '{name}' of a {type(self).__name__} cannot go once the model is "
                "split: change the model before (in place of DistributedDataParallel, which takes "
                "parameters out, use torch's fully_shard or replicate, or plan with a mesh)"
            )
        super().__delattr__(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, stored in self.__dict__["_parameters"].items():
            value = state_dict.get(prefix + name)
            if isinstance(stored, DTensor) and value is not None and value.shape == stored.shape:
                state_dict[prefix + name] = self._shardwright_depth.cut(value, stored)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy._reconstruct(self, memo, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        return copy._reconstruct(self, None, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"a split {type(self).__name__} cannot be pickled, it is but a part of the model: "
            "write it whole with shardwright.save(model, directory)"
        )


@functools.cache
def seeing_class(original: type, names: tuple[str, ...], front: type = Seeing) -> type:
    """`original` with the parameters `names` seen as local ones, and `front` before it."""
    members: dict[str, Any] = {name: _seen(name) for name in names}
    if original.forward is not nn.Module.forward:  # type: ignore[attr-defined]
        members["forward"] = like(original, front.forward)  # type: ignore[attr-defined]
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    for name in REFUSED.keys() & set(dir(original)):
        if name not in vars(front):
            members[name] = _refusing(name)
    for name in ("__doc__", "__module__", "__qualname__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (front, original), members)


REFUSED = {
    "resize_token_embeddings": "resize them before the model is split",
    "save_pretrained": "write the whole model with shardwright.save(model, directory)",
    "push_to_hub": "write it with shardwright.save(model, directory) and push that",
    "add_adapter": "add adapters before the model is split",
    "load_adapter": "load adapters before the model is split",
}
"""Methods of models that would take local tensors for whole ones, and what to do instead."""


def _refusing(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise UsageError(f"{name} of a split {type(self).__name__}: {REFUSED[name]}")

    return refuse


def see_locals(
    model: nn.Module, parameters: dict[int, nn.Parameter], depth: Depth, root: type
) -> None:
    """Put `parameters`, by the id of what was there, in place, and let modules see local ones.

    `root` is the mixin for `model` itself.
    """
    for module in list(model.modules()):
        names = [n for n, p in module._parameters.items() if p is not None]
        if not names and not module._modules:
            continue
        for name in names:
            module._parameters[name] = parameters[id(module._parameters[name])]
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)
        module._shardwright_depth = depth  # type: ignore[assignment]
        front = root if module is model else Seeing
        module.__class__ = seeing_class(type(module), tuple(names), front)
