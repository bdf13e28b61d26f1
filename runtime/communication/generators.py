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
