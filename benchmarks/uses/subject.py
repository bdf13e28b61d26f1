"""A use of a model: a function of a model and its inputs, whole or split alike.

A use returns whatever it shows its caller: tensors in lists and dicts. Gradients that it leaves on
parameters are compared by the runner. What the whole model itself cannot do is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MAKING = threading.Lock()
"""Held while a model is made: ranks that are threads share torch's generator and default dtype."""


class Unfit(Exception):
    """This model has not what the use is about."""


@dataclass(frozen=True)
class Subject:
    """A model under test, its inputs, and a whole copy to prepare a call with."""

    model: Any
    inputs: Mapping[str, Any]
    args: tuple[Any, ...]
    whole: Any
    folder: str
    """Empty at first, and the same for all ranks."""

    def call(self, **more: Any) -> Any:
        """The model's forward with its own inputs, and `more` in place of some."""
        return self.model(*self.args, **{**self.inputs, **more})

    @property
    def ids(self) -> Tensor:
        """Token ids, of models that take such; an encoder's where there is one."""
        if "input_ids" not in self.inputs:
            raise Unfit
        return self.inputs["input_ids"]

    def known(self) -> Any:
        """The model, if it is one of transformers."""
        if not hasattr(self.model, "config") or not hasattr(self.model, "base_model"):
            raise Unfit
        return self.model

    def text(self) -> Any:
        """The model, if it is one of transformers that takes text."""
        assert self.ids is not None
        return self.known()

    def writer(self) -> Any:
        """The model, if it generates."""
        model = self.known()
        if not getattr(model, "can_generate", lambda: False)():
            raise Unfit
        return model


@dataclass(frozen=True)
class Use:
    """A use, and how far its numbers may be off beside what the model's own rounding allows."""

    run: Callable[[Subject], Any]
    tolerance: float = 0.0
    may_refuse: bool = False
    """Whether a clear refusal is as good: the whole model has no such thing to compare with."""
    before: Callable[[Any], Any] | None = None
    """What is done to the model before it is planned and split; None for nothing."""
    own_process: bool = False
    """Whether ranks must be processes: it draws from torch's generator, or compiles."""


USES: dict[str, Use] = {}


def use(
    tolerance: float = 0.0,
    may_refuse: bool = False,
    before: Callable[[Any], Any] | None = None,
    own_process: bool = False,
) -> Callable[[Any], Any]:
    """Add a function to the uses by its name."""

    def add(fn: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
        USES[fn.__name__] = Use(fn, tolerance, may_refuse, before, own_process)
        return fn

    return add


def tensors(tree: Any) -> list[Any]:
    """All tensors in outputs, dicts, lists, dataclasses and own classes, whole, in order."""
    if isinstance(tree, Tensor):
        return [tree.full_tensor() if isinstance(tree, DTensor) else tree]
    if hasattr(tree, "whole") and callable(tree.whole):
        return [tree.whole()]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [t for value in tree for t in tensors(value)]
    if hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type)):
        return [t for value in vars(tree).values() for t in tensors(value)]
    return []


def weigh(tree: Any) -> Tensor:
    """A scalar that depends on each number of all float tensors that want gradients."""
    found = [t for t in tensors(tree) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise Unfit
    weighed = [
        (t.double() * torch.sin(torch.arange(t.numel()).double()).view(t.shape)).sum()
        for t in found
    ]
    return torch.stack(weighed).sum()


def base(model: Any) -> Any:
    """The model below the head."""
    found = getattr(model, "base_model", model)
    if found is model:
        raise Unfit
    return found


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of all stacks, by name."""
    return [
        (f"{name}.{i}", block)
        for name, stack in model.named_modules()
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and len(stack) > 1
        for i, block in enumerate(stack)
    ]


def padding(s: Subject, side: str) -> dict[str, Tensor]:
    """A mask that leaves out three tokens of each sequence but the first."""
    mask = torch.ones_like(s.ids)
    mask[1:, :3] = 0
    return {"attention_mask": mask if side == "left" else mask.flip(1)}


def without_dropout(model: nn.Module) -> None:
    """Turn all dropout off: masks are no one's to compare."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
