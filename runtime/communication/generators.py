"""Sets random number generators to the same state on the ranks that share a model.

Dropout on replicated tensors is then the same on all ranks: that of the unsharded model on the
first rank.
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
    """Set the generator of all ranks to the state on the first rank. All ranks must call it.

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
    """Synchronize generators on the ranks of `mesh` that share the model that has `module`."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for name in (CP, TP):
        if name in mesh.groups:
            draw_alike(mesh[name], device)


def any_trains(modules: Iterable[nn.Module]) -> bool:
    """Return whether any of `modules` is in training mode."""
    return any(map(_TRAINING, modules))


_TRAINING = operator.attrgetter("training")  # avoids a Python frame per module: runs each step
