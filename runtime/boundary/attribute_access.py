"""Properties by which code reads a module's parameters, sharded buffers and local integers.

In a planned call, a parameter reads as this rank's local tensor, whose gradient becomes a DTensor,
and an integer such as `num_heads` has its local value. Other code sees DTensors, and the integers
of the unsplit model. The class of a module has one property for each such name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.boundary.transforms import check_no_transform
from shardwright.runtime.tensors.split_tensor import ToLocal

_CALLBACK: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]


def seen_attribute(name: str) -> property:
    """Make the property for the parameter, buffer or integer `name` of a module."""

    def get(self: Any) -> Any:
        own = self.__dict__
        boundary = own.get("_shardwright")
        if name in own:  # a number
            if boundary is None or boundary.call.active:
                return own[name]
            if name in boundary.full_values and not boundary.call.full:
                _check_not_again(boundary, name)
            return boundary.full_values.get(name, own[name])
        if name not in own["_parameters"]:
            return _buffer(self, name)
        stored = own["_parameters"][name]
        if boundary is None or not boundary.call.active:
            return _outside_of_planned_calls(stored, boundary, name)
        if isinstance(stored, DTensor):
            if len(stored._spec.placements) != boundary.model.axes:
                raise UsageError(
                    f"the parameter '{name}' of a {type(self).__name__} is shared out by FSDP2, "
                    "which has not gathered it: call the module that fully_shard is around"
                )
            trains = torch.is_grad_enabled() and stored.requires_grad
            stored = _with_gradient(stored, boundary) if trains else stored._local_tensor
        elif stored is not None and getattr(boundary.model, "changes", None) is not None:
            raise UsageError(
                f"the parameter '{name}' of a {type(self).__name__} was replaced after the model "
                "was split: change its values in place, or change the model before it is split; "
                "to functional_call give tensors of shardwright.split_tensors"
            )
        use = boundary.uses.get(name)
        return stored if use is None else use(stored)

    def put(self: Any, value: Any) -> None:
        boundary = self.__dict__.get("_shardwright")  # a copy has none yet
        if boundary is not None and isinstance(value, Tensor):
            raise UsageError(
                f"'{name}' of a {type(self).__name__}, a parameter or a number when the model was "
                "split, is set to a tensor, of which ranks would need their parts: change the "
                "model (torch.nn.utils.prune, weight_norm) before it is planned and split"
            )
        self.__dict__[name] = value
        if boundary is not None:
            boundary.full_values.pop(name, None)

    return property(get, put, doc=f"`{name}` as the code that asks should see it.")


def assigned_attribute(name: str) -> property:
    """Make the property for the parameter `name`, whose `data` the model's code sets.

    In a call of the model or of a module, it gives the SplitTensor itself: what is set there stays.
    """
    seen: Any = seen_attribute(name)

    def get(self: Any) -> Any:
        boundary = self.__dict__.get("_shardwright")
        if boundary is None or boundary.model is None:
            return seen.fget(self)
        if not (boundary.call.active or boundary.call.full):
            return seen.fget(self)
        # Dynamo also compiles what eager code between compiled functions calls.
        if torch.compiler.is_compiling() or _CALLBACK() is not None:
            place = f"{boundary.path}.{name}".lstrip(".")
            raise UsageError(
                f"code of the model sets the data of '{place}', or asks for its flags or class, "
                f"which is not supported in compiled code: write {name}.data.copy_(...), and ask "
                "in __init__"
            )
        stored = self.__dict__["_parameters"][name]
        if isinstance(stored, DTensor):
            return stored
        used = seen.fget(self)  # in a dry run
        used._is_param = True  # it compares what code does that asks for nn.Parameter
        return used

    return property(get, seen.fset, doc=seen.__doc__)


def _with_gradient(stored: Any, boundary: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return stored.to_local()
    try:
        return ToLocal.apply(stored, boundary.model.copies)  # type: ignore[return-value]
    except RuntimeError:
        check_no_transform()  # the model's own code may use torch.func
        raise


def _outside_of_planned_calls(stored: Any, boundary: Any, name: str) -> Any:
    """A parameter as code outside of planned calls sees it."""
    if not isinstance(stored, DTensor) or len(stored._spec.placements) != boundary.model.axes:
        return stored
    call = boundary.call
    if call.full:
        if stored._spec.is_replicated():
            trains = torch.is_grad_enabled() and stored.requires_grad
            return _with_gradient(stored, boundary) if trains else stored._local_tensor
        return stored.full_tensor()
    _check_not_again(boundary, name)
    return stored


def _check_not_again(boundary: Any, name: str) -> None:
    """Check that no backward pass runs the code again that reads what ranks have a part of.

    Raises:
        UsageError: it does. Nothing says whether that code first ran in a planned call.
    """
    if torch.compiler.is_compiling() or boundary.call.in_hook or not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() != -1:
        place = f"{boundary.path}.{name}".lstrip(".")
        raise UsageError(
            f"'{place}' is read by code that a backward pass runs again, and that is "
            "in no module's forward: use gradient checkpointing for modules, not for functions "
            "that read parameters, or numbers such as num_heads"
        )


def _buffer(module: Any, name: str) -> Any:
    own = module.__dict__
    if name not in own["_buffers"]:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
    stored, boundary = own["_buffers"][name], own.get("_shardwright")
    if stored is None:
        return None
    if boundary is None or boundary.call.active:
        local = stored._local_tensor if isinstance(stored, DTensor) else stored
        use = None if boundary is None else boundary.uses.get(name)
        return local if use is None else use(local)
    return stored.full_tensor() if boundary.call.full and isinstance(stored, DTensor) else stored
