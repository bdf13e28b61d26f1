"""How modules see parameters that are DTensors: as local tensors while they compute.

Outside of any call `module.weight` is the DTensor, so what one computes of it there is of the
whole weight; so it is in code that was put in the place of a forward (`model.forward = ...`, as trl
does). Within a call of the model, or of a module in it, it is the local tensor, whose gradient
comes back as a DTensor laid out as the parameter is. For that each module with parameters gets a
class in front of its own, and the modules of one model share a `Calls`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    is_functorch_wrapped_tensor,  # pyright: ignore[reportMissingImports]
)
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.code.attributes import SIZES
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.communication.replicas import Copies
from shardwright.runtime.noticed.settings import Change, Settled
from shardwright.runtime.outside.functional import PART, WITHIN, is_transforming, refuse
from shardwright.runtime.outside.replaced_forwards import replaced, whole_in_replaced
from shardwright.runtime.redistribution import overlap
from shardwright.runtime.running import Running
from shardwright.runtime.subclasses import like, subclass, subclass_with
from shardwright.runtime.tensors import buffers
from shardwright.runtime.tensors.dtensors import axes_of, check_own, cut


class Calls:
    """What the modules of one model share."""

    def __init__(self, mesh: Mesh, running: Running) -> None:
        self.mesh, self.running = mesh, running
        self.root: nn.Module | None = None
        self.changed = False
        """Whether modules or parameters were put into the model since its last call."""
        self.arrived: list[str] = []
        """Digests of whole parameters that were put into the model since its last call."""
        self.settings: list[Change] = []
        """Plain attributes of modules that were set since the model was split."""
        self.asked: frozenset[str] = frozenset()
        """Names that code of the model asks for."""
        self.switching = False
        """Whether modules are told to train, or not to."""
        self.replaced = False
        """Whether a forward was put on a module within."""
        self.copies: Copies | None = None
        """Of the model, if it averages its gradients over them."""
        self.axes = len(axes_of(mesh))
        """Dims of the mesh of parameters: FSDP2 stores them over more."""

    def inside(self) -> bool:
        """Whether the code that asks runs in a call of a module of the model."""
        if self.running.now:
            return True
        if torch.compiler.is_compiling():  # which follows no frames
            if self.root is not None and "forward" in self.root.__dict__:
                raise UsageError(
                    "torch.compile of a split model whose forward was replaced, by code that knows "
                    "of no parts: run it without, or compile before the forward is replaced"
                )
            return True
        # A module called by itself of which nothing is split, or what runs again for a backward
        # pass: seldom, so that looking for it takes no time where the root is called.
        again = torch._C._current_graph_task_id() != -1
        frame, ran = sys._getframe(2), set[Any]()
        while frame is not None:
            ran.add(frame.f_code)
            if again and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                return True
            if frame.f_code is _CALL:
                owner = frame.f_locals.get("self")
                if owner is not None and "_shardwright_newcomer" in owner.__dict__:
                    return False  # it computes with whole tensors
                if owner is not None and owner.__dict__.get("_shardwright_calls") is self:
                    # Code that was put in the place of a forward knows of no parts, nor do hooks.
                    own = getattr(type(owner).forward, "__code__", None)
                    return own in ran or (own is None and "forward" not in owner.__dict__)
            frame = frame.f_back
        return False

    def put_forward(self, module: nn.Module, forward: Any) -> None:
        """Put a `forward` on a module of the model; on the root it is called with whole tensors."""
        if module is not self.root:
            forward = replaced(module, forward, self)
        vars(module).pop("forward", None)
        if forward is not None:
            vars(module)["forward"] = forward

    def alone(self) -> bool:
        """Whether code inside, in no call of the model, is of a module that was called by itself.

        And not what runs again for a backward pass, or is compiled.
        """
        return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1

    def has(self, parameter: Tensor | None) -> bool:
        """Whether it is one of the model's that FSDP2 has not taken over."""
        return isinstance(parameter, DTensor) and len(parameter.placements) == self.axes

    def cut(self, value: Tensor, stored: DTensor, name: str) -> Tensor:
        """What this rank holds of `value`, laid out as `stored`; a DTensor stays as it is.

        Raises:
            UsageError: it is one that another rank had.
        """
        if not isinstance(value, DTensor):
            return cut(value, stored, self.mesh)
        check_own(value, stored.device_mesh, name)
        return value


_CALL = nn.Module._call_impl.__code__


class Local(torch.autograd.Function):
    """The local tensor of a parameter. Does what `to_local` does, which takes twice as long."""

    @staticmethod
    def forward(ctx: Any, stored: DTensor, copies: Copies | None) -> Tensor:  # type: ignore[override]
        """The local tensor."""
        ctx.spec, ctx.owed = stored._spec, None
        ctx.noted = None if copies is None else (copies, stored)
        local = stored._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:  # type: ignore[override]
        """The gradient, laid out as the parameter is."""
        spec = ctx.spec
        grad = (grad if ctx.owed is None else overlap.paid(ctx, grad)).contiguous()
        if ctx.noted is not None:
            copies, stored = ctx.noted
            copies.note(stored)
        if torch.is_grad_enabled():  # it will be differentiated again
            at = (spec.mesh, spec.placements)
            return DTensor.from_local(grad, *at, shape=spec.shape, stride=spec.stride), None
        return DTensor.__new__(DTensor, grad, spec, requires_grad=False), None


def _seen(name: str, used: bool) -> property:
    """The parameter `name`; through its use in the plan where it has one."""

    def get(self: Any) -> Any:
        own = self.__dict__
        try:
            stored, calls = own["_parameters"][name], own["_shardwright_calls"]
        except KeyError:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'"
            ) from None
        now = calls.running.now
        if stored is None:
            return stored
        if not (now or calls.inside()):
            return whole_in_replaced(stored, sys._getframe(1), calls) if calls.replaced else stored
        if type(stored) is not DTensor:
            if is_functorch_wrapped_tensor(stored):
                refuse(PART)
            raise UsageError(
                f"the parameter '{name}' of a {type(self).__name__} was replaced after the model "
                "was split: change its values in place, or change the model before it is split"
            )
        if len(stored._spec.placements) != calls.axes:
            return stored  # FSDP2 has it, takes what it reads here for the parameter
        if not now and calls.alone() and not all(p.is_replicate() for p in stored.placements):
            return stored.full_tensor()  # beside what modules within give, which is whole
        if not torch.is_grad_enabled() or not stored.requires_grad:
            local = stored._local_tensor
        else:
            local = _with_gradient(stored, calls)
        return own["_shardwright"].uses[name](local) if used else local

    return property(get, doc=f"`{name}` as the code that asks should see it.")


def _seen_buffer(name: str) -> property:
    """The buffer `name`, of which a rank has a part: whole for code that runs in no call."""

    def get(self: Any) -> Any:
        own = self.__dict__
        stored, calls = own["_buffers"].get(name), own["_shardwright_calls"]
        if stored is None or calls.running.now or calls.inside():
            # `torch.func.functional_call` puts in what `named_buffers` gave.
            return buffers.local(self, name, stored) if isinstance(stored, DTensor) else stored
        whole = buffers.shown(self, name)
        return whole_in_replaced(whole, sys._getframe(1), calls) if calls.replaced else whole

    return property(get, doc=f"`{name}` as the code that asks should see it.")


def _seen_number(name: str) -> property:
    """The attribute `name`, with local numbers for code that runs in a call, else whole ones."""

    def get(self: Any) -> Any:
        own = self.__dict__
        if name not in own:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        calls = own.get("_shardwright_calls")
        if calls is None or calls.running.now or calls.inside():
            return own[name]
        return own["_shardwright"].wholes.get(name, own[name])

    def put(self: Any, value: Any) -> None:
        own = self.__dict__
        own[name] = value
        if (state := own.get("_shardwright")) is not None:  # a copy has none yet
            state.wholes.pop(name, None)

    return property(get, put, doc=f"`{name}` as the code that asks should see it.")


def _size(name: str, dim: int) -> property:
    """What a layer of torch says of a size of its weight: the whole one, but in a call."""

    def get(self: Any) -> Any:
        own = self.__dict__
        stored, calls = own["_parameters"].get("weight"), own["_shardwright_calls"]
        if not isinstance(stored, DTensor) or calls.running.now or calls.inside():
            return own[name]
        return stored.shape[dim]

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put, doc=f"`{name}` as the code that asks should see it.")


def _with_gradient(stored: Any, calls: Calls) -> Any:
    if torch.compiler.is_compiling():
        return stored.to_local()
    try:
        return Local.apply(stored, calls.copies)
    except RuntimeError:
        if is_transforming():
            refuse(WITHIN)
        raise


def _flat_weights(self: Any) -> list[Tensor]:
    return [getattr(self, name, None) for name in self._flat_weights_names]  # type: ignore[misc]


class Seeing(Settled):
    """Mixin in front of the class of a module that has parameters."""

    _shardwright_calls: Calls

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__["_parameters"]:
            raise UsageError(
                f"the parameter '{name}' of a {type(self).__name__} cannot go once the model is "
                "split: change the model before (in place of DistributedDataParallel, which takes "
                "parameters out, plan with a mesh, whose copies average their gradients by "
                "themselves, or use torch's fully_shard)"
            )
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)  # type: ignore[misc]
        calls, parameters = self._shardwright_calls, self.__dict__["_parameters"].values()
        if calls.copies is not None:
            calls.copies.watch(p for p in parameters if calls.has(p))
        return out

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, stored in self.__dict__["_parameters"].items():
            value = state_dict.get(prefix + name)
            if isinstance(stored, DTensor) and value is not None and value.shape == stored.shape:
                own = self._shardwright_calls.cut(value, stored, prefix + name)
                state_dict[prefix + name] = own
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"a split {type(self).__name__} cannot be pickled, it is but a part of the model: "
            "write it whole with shardwright.save(model, directory)"
        )


@functools.cache
def seeing_class(
    original: type,
    names: tuple[str, ...],
    front: type = Seeing,
    split: tuple[str, ...] = (),
    numbers: tuple[str, ...] = (),
) -> type:
    """`original` with the parameters `names` seen as local ones, and `front` before it.

    And, in no call, with the buffers `split` as DTensors, and attributes with whole `numbers`.
    """
    members: dict[str, Any] = {name: _seen_buffer(name) for name in split}
    members.update((name, _seen_number(name)) for name in numbers)
    for name in names:
        members[name] = _seen(name, used=isinstance(getattr(original, name, None), property))
    for kind, sizes in SIZES if "weight" in names else ():
        if issubclass(original, kind):
            members.update({name: _size(name, dim) for dim, name in enumerate(sizes)})
    if hasattr(front, "forward"):
        members["forward"] = like(original, front.forward)
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    for name in REFUSED.keys() & set(dir(original)):
        members[name] = getattr(front, f"_shardwright_{name}", None) or _refusing(name)
    return subclass_with(original, members, front)


REFUSED = {
    "resize_token_embeddings": "resize them before the model is split",
    "save_pretrained": "write the whole model with shardwright.save(model, directory)",
    "push_to_hub": "write it with shardwright.save(model, directory) and push that",
    "add_adapter": "add adapters before the model is split",
    "load_adapter": "load adapters before the model is split",
    "init_continuous_batching": "it keeps a cache for all heads, of which a rank has some, and "
    "ranks would take requests each for itself: use generate()",
}
"""Methods of models that would take local tensors for whole ones, and what to do instead."""


def _refusing(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise UsageError(f"{name} of a split {type(self).__name__}: {REFUSED[name]}")

    return refuse


def see_locals(
    model: nn.Module, parameters: dict[int, nn.Parameter], calls: Calls, root: type
) -> None:
    """Put `parameters`, by the id of what was there, in place, and let modules see local ones.

    `root` is the mixin for `model` itself.
    """
    calls.root = model
    for module in list(model.modules()):
        vars(module)["_shardwright_calls"] = calls
        names = tuple(n for n, p in module._parameters.items() if p is not None)
        for name in names:
            module._parameters[name] = parameters[id(module._parameters[name])]
        if isinstance(module, nn.RNNBase):
            module.__dict__.pop("_flat_weights", None)
        front, split = root if module is model else Seeing, buffers.names(module)
        state: Any = vars(module).get("_shardwright")
        numbers = tuple(state.wholes) if state is not None else ()
        refuses = REFUSED.keys() & set(dir(type(module)))
        if names or split or numbers or module is model or refuses:
            module.__class__ = seeing_class(type(module), names, front, split, numbers)
        else:
            module.__class__ = subclass(type(module), Settled)
