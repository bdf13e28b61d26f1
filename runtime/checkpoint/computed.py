"""Parameters that a checkpoint may lack because the model computes them, sinusoids for one."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.contract.dims import local_ranges
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.placement import Placement


class Computed:
    """Values that a model's own initialisation gives to parameters that may be missing.

    Made of a model on meta before its layers are swapped for local ones.
    """

    def __init__(self, model: nn.Module) -> None:
        patterns: tuple[str, ...] = tuple(
            getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        )
        self._owners: dict[str, tuple[Any, nn.Module]] = {}
        if not patterns or not hasattr(model, "_init_weights"):
            return
        for name, _ in model.named_parameters(remove_duplicate=False):
            if any(re.search(pattern, name) for pattern in patterns):
                owner = model.get_submodule(name.rpartition(".")[0])
                self._owners[name] = _innermost(model, name)._init_weights, copy.deepcopy(owner)

    def value(self, name: str) -> Tensor | None:
        """The whole parameter; None if it is drawn at random, so that there is no right value."""
        if name not in self._owners:
            return None
        initialize, owner = self._owners[name]
        drawn = [_drawn(initialize, owner, name.rpartition(".")[2], seed) for seed in range(2)]
        return drawn[0] if torch.equal(*drawn) else None


def held(whole: Tensor, placement: Placement | None, coords: Coords) -> Tensor:
    """The part of `whole` that the rank at `coords` holds."""
    for d, dim in enumerate(placement.dims if placement is not None else ()):
        ranges = [torch.arange(a, b) for a, b in local_ranges(dim, coords)]
        whole = whole.index_select(d, torch.cat(ranges or [torch.arange(0)]))
    return whole.clone()


def _innermost(model: Any, name: str) -> Any:
    """The innermost model of transformers that holds `name`: they initialise their own modules."""
    inner = found = model
    for step in name.split(".")[:-1]:
        inner = getattr(inner, step)
        found = inner if hasattr(inner, "_init_weights") else found
    return found


@torch.no_grad()
def _drawn(initialize: Any, owner: nn.Module, leaf: str, seed: int) -> Tensor:
    """What `initialize` makes of `leaf` of a copy of `owner`, over memory filled with NaN."""
    module = copy.deepcopy(owner)
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        parameter.fill_(torch.nan if parameter.is_floating_point() else seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initialize(module)
    return module.get_parameter(leaf).detach()
