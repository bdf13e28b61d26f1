"""Generators of random numbers: ranks that share a model have them stand alike.

What all ranks have is then dropped alike, as the unsplit model on the first rank would drop it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.planner.contract.mesh import CP, TP
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.running import Running
from shardwright.runtime.subclasses import subclass


def draw_alike(
    group: Group, device: torch.device, generator: torch.Generator | None = None
) -> None:
    """Put the generators of all ranks where that of the first stands; all call it.

    It is the default generator of `device` unless another is given.
    """
    if group.size == 1 or group.pg is None or device.type == "meta":
        return
    if generator is not None:
        own, put = generator.get_state(), generator.set_state
    elif device.type == "cpu":
        own, put = torch.get_rng_state(), torch.set_rng_state
    else:
        module: Any = torch.get_device_module(device)
        own, put = module.get_rng_state(device), partial(module.set_rng_state, device=device)
    put(all_gather(own.to(device), group)[0].cpu())


def draw_as_first(module: nn.Module, mesh: Mesh) -> None:
    """Put generators alike on all ranks of `mesh` that share the model `module` is a part of."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for name in (CP, TP):
        if name in mesh.groups:
            draw_alike(mesh[name], device)


def any_trains(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is in training mode."""
    return any(map(_TRAINING, modules))


_TRAINING = operator.attrgetter("training")  # no frame of Python for each: it is asked each step


class AsFirst:
    """Before a part of a model that is called by itself: it draws as on the first rank.

    Args:
        mesh: Where this rank stands.
        always: Whether numbers are drawn in eval mode, too.
    """

    def __init__(self, mesh: Mesh, always: bool) -> None:
        self.mesh, self.always = mesh, always

    def __call__(self, module: nn.Module) -> None:
        """Put generators alike if `module` may draw; all ranks call it."""
        if not torch.compiler.is_compiling() and (self.always or any_trains(module.modules())):
            draw_as_first(module, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> AsFirst:
        return self


class Around:
    """Mixin in front of a module that the plan leaves as it is, and that has split ones within."""

    _shardwright_called_in: Running
    _shardwright_as_first: AsFirst

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if not self._shardwright_called_in.now:
            self._shardwright_as_first(self)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def draw_alike_alone(model: nn.Module, running: Running, always: bool) -> None:
    """Let all parts of `model` that have split modules in them draw alike when called alone."""
    for module in model.modules():
        states = (s for m in module.modules() if (s := vars(m).get("_shardwright")) is not None)
        if module is model or (state := next(states, None)) is None:
            continue
        as_first, own = AsFirst(state.mesh, always), vars(module).get("_shardwright")
        if own is not None:
            own.alone.as_first = as_first
        elif type(module).forward is not nn.Module.forward:
            vars(module).update(_shardwright_called_in=running, _shardwright_as_first=as_first)
            module.__class__ = subclass(type(module), Around)
