"""The class that each module of a split model gets in front of its own.

`boundary_class` makes it, with the name of the original class, and caches it. All other differences
between modules are data in their `ModuleBoundary`.
"""

from __future__ import annotations

import copy
import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.names import grouped
from shardwright.runtime.boundary.attribute_access import assigned_attribute, seen_attribute
from shardwright.runtime.boundary.hooks import HookedModule
from shardwright.runtime.boundary.module_boundary import ModuleBoundary
from shardwright.runtime.code import call_sites
from shardwright.runtime.code.attributes import PREFIX
from shardwright.runtime.redistribution import overlap
from shardwright.runtime.scopes import replaced
from shardwright.runtime.subclasses import class_like, like, sharing_attributes
from shardwright.runtime.tensors.buffers import stored_as
from shardwright.runtime.tensors.by_name import NOW
from shardwright.runtime.tensors.split_tensor import SplitTensor


class BoundaryModule(HookedModule):
    """Base class in front of the class of each module of a split model."""

    _shardwright: ModuleBoundary
    _shardwright_original: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a container is in no split model."""
        original = getattr(cls, "_shardwright_original", cls)
        if original is cls or not (args or kwargs):  # the latter for copies
            return super().__new__(cls)
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    # --- attributes that are set or deleted

    def __setattr__(self, name: str, value: Any) -> None:
        if (changes := _changes(self)) is None:
            return super().__setattr__(name, value)
        if isinstance(value, nn.Parameter) and isinstance(value, DTensor):
            stored = self.__dict__["_parameters"].get(name)
            if not (changes.model.has(value) and changes.model.has(stored)):
                # FSDP2 sets its own parameters: plain DTensors, made from SplitTensors.
                changes.model.check_averaged(value)
                self.__dict__["_parameters"][name] = SplitTensor.adopt(value)
                return None
        elif isinstance(value, nn.Module):
            changes.set_module(self, name, value)
        elif isinstance(value, Tensor) and isinstance(
            stored := self.__dict__["_buffers"].get(name), SplitTensor
        ):
            value = stored_as(value, stored, name)
        elif isinstance(value, Tensor):
            if _sets_itself(self, name, value):
                return None
            _check_not_by_hook(self, name, changes)
        elif name == "forward":
            return changes.set_forward(self, value)
        else:
            changes.note(self, name, value)
        return super().__setattr__(name, value)

    def register_parameter(self, name: str, param: Any) -> None:
        """As in torch. If a full parameter replaces a sharded one, its shard is stored."""
        if (changes := _changes(self)) is not None:
            param = changes.set_parameter(self, name, param)
        super().register_parameter(name, param)  # type: ignore[misc]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As in torch. A module that replaces another computes with full tensors."""
        if (changes := _changes(self)) is not None:
            changes.set_module(self, name, module)
        super().add_module(name, module)  # type: ignore[misc]

    def __delattr__(self, name: str) -> None:
        changes = _changes(self)
        if changes is not None and name != "forward":
            if name in self.__dict__["_parameters"]:
                raise UsageError(
                    f"the parameter '{name}' of a {type(self).__name__} cannot go once the model "
                    "is split: change the model before (in place of DistributedDataParallel, which "
                    "takes parameters out, plan with a mesh, whose copies average their gradients "
                    "by themselves, or use torch's fully_shard)"
                )
            changes.note_deleted(self, name)
        super().__delattr__(name)

    def train(self, mode: bool = True) -> Any:
        """As in the module's own class. What its code sets here, it also set while traced."""
        changes = _changes(self)
        if changes is None or changes.switching:
            return super().train(mode)  # type: ignore[misc]
        with replaced(changes, switching=True):
            return super().train(mode)  # type: ignore[misc]

    # --- state dicts, devices and copies

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        state_dict, prefix = args[:2]
        held = {**self.__dict__["_parameters"], **self.__dict__["_buffers"]}
        for name, stored in held.items():
            value, model = state_dict.get(prefix + name), self._shardwright.model
            full = stored._spec.shape if isinstance(stored, DTensor) else None
            if value is not None and value.shape == full:
                assert model is not None
                state_dict[prefix + name] = model.cut(value, stored, prefix + name)
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with replaced(NOW, attribute=None):  # `fn` converts SplitTensors in forwards too
            out = super()._apply(fn, recurse)  # type: ignore[misc]
        model, parameters = self._shardwright.model, self.__dict__["_parameters"].values()
        if model is not None and model.copies is not None:
            model.copies.watch(p for p in parameters if model.has(p))
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"a split {type(self).__name__} cannot be pickled: write the full model with "
            "shardwright.save(model, directory), or each rank's part with "
            "torch.save(model.state_dict(), file)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if is_parametrized(self):  # type: ignore[arg-type]
            return super().__deepcopy__(memo)  # type: ignore[misc]
        twin = copy._reconstruct(self, memo, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]
        for name in self._lost_in(twin):
            vars(twin)[name] = copy.deepcopy(vars(self)[name], memo)
        return twin

    def __copy__(self) -> Any:
        twin = copy._reconstruct(self, None, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]
        vars(twin).update({name: vars(self)[name] for name in self._lost_in(twin)})
        return twin

    def _lost_in(self, twin: Any) -> list[str]:
        """Names that splitting put into the module and a copy by its own class lacks."""
        lost = [n for n in vars(self) if n.startswith(PREFIX) and n not in vars(twin)]
        return [*lost, *self._shardwright.full_values] if PREFIX in lost else lost

    def _shardwright_sizes(self, call: str, *given: Any) -> tuple[Any, ...]:
        """The local sizes of a call in the module's code. Recompiled methods call this."""
        return self._shardwright.sizes[call].local(given)

    def extra_repr(self) -> str:
        """The module's own `extra_repr`, and local and full sizes of what is sharded."""
        parts = [super().extra_repr()]  # type: ignore[misc]
        parts += [
            f"{name}: {list(p.local_shape(self._shardwright.mesh.coords))} of {list(p.shape)}"
            for name, p in self._shardwright.placements.items()
            if p.meshes
        ]
        return ", ".join(p for p in parts if p)


def _changes(module: Any) -> Any:
    """The `ChangeDetection` of a module's model; None before its parameters are DTensors."""
    boundary = module.__dict__.get("_shardwright")
    return None if boundary is None or boundary.model is None else boundary.model.changes


def _sets_itself(module: Any, name: str, value: Tensor) -> bool:
    """Whether `self.weight *= 2` or the like sets a parameter to what code sees of it.

    Raises:
        UsageError: code of a planned call sets it to something else.
    """
    held = module.__dict__["_parameters"].get(name)
    if not isinstance(held, DTensor) or isinstance(value, nn.Parameter):
        return False
    if not module._shardwright.call.active or value is held._local_tensor:
        return value is held._local_tensor
    raise UsageError(
        f"a forward sets the parameter '{name}' of a {type(module).__name__} to a tensor: set its "
        f"data (self.{name}.data = tensor)"
    )


def _check_not_by_hook(module: Any, name: str, changes: Any) -> None:
    """Check that no hook, which sees full tensors, sets an attribute that code of forwards reads.

    Raises:
        UsageError: a hook does. Buffers are stored as they should be.
    """
    by_hook = module._shardwright.call.in_hook and name not in module._buffers
    if by_hook and name in changes.read_names.in_forwards:
        raise UsageError(
            f"a hook sets '{name}' of a {type(module).__name__} to a tensor, which is full, and "
            "the code that reads it works on parts: compute it in a forward, or by "
            "torch.nn.utils.parametrize"
        )


class LocalModule(BoundaryModule):
    """Class in front of that of a module that the plan changes, or that has parameters."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Redistribute the inputs, run the module's own forward, redistribute the outputs.

        This runs for each module and token. What most modules need is inlined, and no function is
        called for what a module does not need.
        """
        boundary = self._shardwright
        if not boundary.call.active:
            if not boundary.note_call():
                return boundary.call_directly(self, args, kwargs)
            return boundary.repeat(LocalModule.forward, self, args, kwargs)
        if not boundary.was_planned:
            boundary.was_planned = True
        trains = torch.is_grad_enabled()
        if boundary.inputs and (trains or not boundary.idle_in):
            args, kwargs = boundary.enter(args, kwargs)
        spent = boundary.linear and len(args) == 1 and not kwargs
        if spent:
            own: dict[str, Any] = self.__dict__
            weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias", self)
            if (
                trains
                or boundary.uses
                or not isinstance(weight, DTensor)
                or len(weight._spec.placements) != boundary.model.axes
                or "parametrizations" in own
            ):
                weight, bias = self.weight, bias if bias is None else self.bias
            else:  # the same as reading the attributes, without a Python frame for each
                weight, bias = weight._local_tensor, bias if bias is None else bias._local_tensor
            output: Any = (
                overlap.linear(args[0], weight, bias, boundary.group)
                if trains
                else F.linear(args[0], weight, bias)
            )
        elif boundary.apart:
            output = boundary.compute(self, args, kwargs)
        else:
            output = boundary.code(self, *args, **kwargs)
        if boundary.idle_out and not trains:
            return output
        reshard = boundary.sole_output
        if reshard is None or not isinstance(output, Tensor):
            return boundary.leave(output, self) if boundary.leaves else output
        shape = output.shape
        if len(shape) != len(reshard.shape):
            return boundary.leave(output, self)  # raises
        for dim, size in reshard.known:
            if shape[dim] != size:
                return boundary.leave(output, self)
        for step in reshard.steps if trains else reshard.spent if spent else reshard.forward:
            output = step(output)
        return output


def call_with_originals(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module._call_impl` of a module that takes inputs before an enclosing module changed them.

    Usually `enter` restores the originals. Hooks run earlier, and a module that replaces another
    does not call `enter`: for both, the originals are restored here.
    """
    boundary = self._shardwright
    hooks = self._forward_hooks or self._forward_pre_hooks
    hooks = hooks or self._backward_hooks or self._backward_pre_hooks
    own_call = super(BoundaryModule, self)._call_impl  # pyright: ignore[reportAttributeAccessIssue]
    if not (hooks or boundary.computes_with_full) or not boundary.note_call():
        return own_call(*args, **kwargs)
    args = boundary.with_outer_inputs(args, kwargs)
    boundary.has_outer_inputs = True
    try:
        return own_call(*args, **kwargs)
    finally:
        boundary.has_outer_inputs = False


REFUSED = {
    "resize_token_embeddings": "resize them before the model is split",
    "save_pretrained": "write the whole model with shardwright.save(model, directory)",
    "push_to_hub": "write it with shardwright.save(model, directory) and push that",
    "add_adapter": "add adapters before the model is split",
    "load_adapter": "load adapters before the model is split",
    "init_continuous_batching": "call it on the whole model",
}
"""Methods of models that would mistake local tensors for full ones, and what to do instead."""


def _refusing(name: str) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise UsageError(f"{name} of a split {type(self).__name__}: {REFUSED[name]}")

    return refuse


def put_class(module: nn.Module, boundary: ModuleBoundary, *bases: type, named: type) -> None:
    """Give `module` its boundary, and a class in front of its own.

    Args:
        module: The module; its class is changed in place.
        boundary: Its boundary.
        bases: The front class, the module's own class, and any classes after it.
        named: The class whose name, module and so on the new class takes.
    """
    names = {n for n, p in module._parameters.items() if p is not None}
    names |= {n for n, p in boundary.placements.items() if n in module._buffers and p.meshes}
    # A replicated buffer may be used sharded.
    names |= boundary.full_values.keys() | boundary.uses.keys()
    original, before = boundary.unsplit_class, bool(boundary.inputs_from_outer)
    sizes, seen = tuple(sorted(boundary.sizes)), tuple(sorted(names))
    made = boundary_class(original, bases, named, seen, sizes, before, boundary.assigned)
    behind = made.__mro__[made.__mro__.index(BoundaryModule) + 1 :]
    own = (vars(kind)["forward"] for kind in behind if "forward" in vars(kind))
    boundary.code = methods_with_local_sizes(original, sizes).get("forward") or next(own)
    boundary.bases, boundary.shown_class = bases, named
    vars(module)["_shardwright"] = boundary
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    module.__class__ = made


@functools.cache
def boundary_class(
    original: type,
    bases: tuple[type, ...],
    named: type,
    names: tuple[str, ...],
    local_sizes: tuple[str, ...],
    before: bool,
    assigned: tuple[str, ...],
) -> type:
    """Make the class with `bases`, in which `names` are properties (`seen_attribute`).

    Args:
        original: The module's own class.
        bases: The front class, the module's own class, and any classes after it.
        named: The class whose name the new one takes.
        names: Parameters, buffers and integers that code may see in two ways.
        local_sizes: Calls in the module's code that are given local sizes.
        before: Whether the module takes inputs before an enclosing module changed them.
        assigned: Parameters whose `data` the model's code sets.
    """
    front: Any = bases[0]
    members: dict[str, Any] = {"_shardwright_original": original}
    members |= {name: seen_attribute(name) for name in names}
    members |= {name: assigned_attribute(name) for name in assigned}
    if hasattr(front, "forward"):
        members["forward"] = like(original, front.forward)
    if before:
        members["_call_impl"] = call_with_originals
    if issubclass(original, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    for name in REFUSED.keys() & set(dir(original)):
        members[name] = getattr(front, f"_shardwright_{name}", None) or _refusing(name)
    members = {**methods_with_local_sizes(original, local_sizes), **members}
    if "generate" in vars(front) and callable(getattr(original, "generate", None)):
        members["generate"] = like(original, front.generate)
    return class_like(named, bases, members, sharing_attributes(type(original)))


@functools.cache
def methods_with_local_sizes(original: type, calls: tuple[str, ...]) -> dict[str, FunctionType]:
    """Recompile the methods of `original` that contain `calls`, which then get local sizes.

    Raises:
        PlanError: the source of a method cannot be read, or does not have one of the calls.
    """
    found: dict[str, Any] = {}
    for name, named in grouped((call.partition(".")[0], call) for call in calls).items():
        method = call_sites.method_of(original, name)
        found[name] = method and call_sites.with_local_sizes(method, named)
        if found[name] is None:
            raise PlanError(
                f"the code of {original.__name__}.{name} is not that which the plan is for, or its "
                f"source cannot be read: it has no {', '.join(named)}; plan again"
            )
    return found


def _flat_weights(self: Any) -> list[Tensor]:
    return [getattr(self, name, None) for name in self._flat_weights_names]  # type: ignore[misc]
