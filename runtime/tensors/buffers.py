"""Split buffers as others see them: DTensors, as parameters are, so that none is taken for whole.

So they are in state dicts, and for code that runs in no call, `named_buffers()` too. In the modules
they stay plain local tensors, which code changes in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.errors import PlanError
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.dtensors import as_dtensor, check_own, placements_of

_OWN = nn.Module.named_buffers


@cache
def watch_named_buffers() -> None:
    """From now on, `named_buffers` of a split model, and of what is around it, gives DTensors."""
    nn.Module.named_buffers = _named_buffers  # type: ignore[method-assign]


def local_buffers(
    model: nn.Module, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The buffers by name as modules have them: of split ones this rank's parts."""
    return _OWN(model, prefix, remove_duplicate=remove_duplicate)


def _named_buffers(
    self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The buffers by name, as the code that asks should see them."""
    owners: dict[int, tuple[nn.Module, str]] = {}

    def of(module: nn.Module) -> Any:
        owners.update((id(x), (module, name)) for name, x in module._buffers.items())
        return module._buffers.items()

    for path, buffer in self._named_members(of, prefix, recurse, remove_duplicate):
        module, name = owners[id(buffer)]
        state = vars(module).get("_shardwright")
        is_hidden = state is not None and not state.call.active and name in names(module)
        yield path, shown(module, name) if is_hidden else buffer


def names(module: Any) -> tuple[str, ...]:
    """The buffers of a module of which each rank has a part."""
    return tuple(name for name, *_ in _split(module)) if "_shardwright" in vars(module) else ()


def shown(module: Any, name: str) -> Any:
    """A split buffer as a DTensor that shares its memory."""
    state, buffer = module._shardwright, module._buffers[name]
    placement, mesh = state.placements[name], state.mesh
    device_mesh = mesh.parameter_mesh()
    if device_mesh is None:
        return buffer
    spec = DTensorSpec(device_mesh, placements_of(placement, mesh))
    whole: Any = placement.shape
    return as_dtensor(buffer, torch.Size(whole), spec)


def local(module: Any, name: str, value: DTensor) -> Tensor:
    """What this rank has of a DTensor that is put in the place of a split buffer.

    Raises:
        PlanError: it is not of the shape of the whole.
        UsageError: it is one that another rank had.
    """
    given: dict[str, Any] = {name: value}
    cut(module, given, "")
    return given[name]


def _split(module: Any) -> Iterator[tuple[str, Tensor, Placement, Mesh]]:
    """The buffers of a split module of which each rank has a part, by name."""
    state = module._shardwright
    for name, buffer in module._buffers.items():
        placement = state.placements.get(name)
        if buffer is not None and placement is not None and placement.meshes:
            yield name, buffer, placement, state.mesh


def show(module: Any, destination: Any, prefix: str) -> None:
    """Put DTensors, which share their memory, in the place of split buffers in a state dict."""
    for name in names(module):
        if prefix + name in destination:
            destination[prefix + name] = shown(module, name)


def cut(module: Any, state_dict: Any, prefix: str) -> None:
    """Put this rank's parts in the place of whole buffers, and of DTensors, in a state dict.

    Raises:
        PlanError: a DTensor is not of the shape of the whole.
        UsageError: it is one that another rank had.
    """
    for name, buffer, placement, mesh in _split(module):
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            if tuple(value.shape) != placement.shape:
                raise PlanError(
                    f"'{prefix}{name}' in this state dict has shape {list(value.shape)}; "
                    f"the whole has {list(placement.shape)}"
                )
            if (own := mesh.parameter_mesh()) is not None:
                check_own(value, own, prefix + name)
            state_dict[prefix + name] = value._local_tensor
        elif isinstance(value, Tensor) and tuple(value.shape) == placement.shape:
            state_dict[prefix + name] = take_local(value.to(buffer.device), placement, mesh)
