"""Modules and parameters that come or go after a model was split: noticed at its next forward."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.seen import Seeing


class Guard:
    """What a split model was made of when it was last looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.owners = dict(model.named_modules())
        self.children = [m for owner in self.owners.values() for m in owner._modules.values()]
        self.parameters = sum(len(owner._parameters) for owner in self.owners.values())
        self.seen: tuple[int, ...] | None = None
        self.homes: list[Any] = []

    def check(self, model: nn.Module) -> None:
        """Look whether all is as it was; at some 0.1 µs a module.

        What only wraps modules of the model (checkpointing, `torch.compile`) may come.

        Raises:
            UsageError: a parameter came that is not split, or a module that the plan changed went.
        """
        if self.seen is None:
            self.seen = tuple(map(id, self.children))
            self.homes = [owner._modules for owner in self.owners.values()]
            self.stores = [owner._parameters for owner in self.owners.values()]
        now = tuple(map(id, chain.from_iterable(map(dict.values, self.homes))))
        if now != self.seen or sum(map(len, self.stores)) != self.parameters:
            self._accept(model)

    def _accept(self, model: nn.Module) -> None:
        there = set(map(id, model.modules()))
        for path, module in self.owners.items():
            if "_shardwright" in module.__dict__ and id(module) not in there:
                raise UsageError(
                    f"'{path}' was replaced or taken out after the model was split, and what the "
                    "plan does there went with it: change the model before it is split"
                )
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise UsageError(
                    f"the parameter '{name}' came into the model after it was split, and no rank "
                    "knows how it lies over the ranks: add it (adapters, embeddings) before"
                )
        self.__init__(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        new = Guard.__new__(Guard)
        new.owners = copy.deepcopy(self.owners, memo)
        new.children = copy.deepcopy(self.children, memo)
        new.parameters, new.seen, new.homes = self.parameters, None, []
        return new


class GuardedRoot(Seeing):
    """Mixin in front of the root of a split model."""

    _shardwright_guard: Guard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, once it is seen to be what was split."""
        if not torch.compiler.is_compiling():
            self._shardwright_guard.check(self)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        raise UsageError(
            "DistributedDataParallel takes the parts of a split model for copies of the whole: "
            "use torch's fully_shard or replicate over the other ranks, or plan with a mesh"
        )
