"""The root of a split model: tells the head when a loss is wanted, and seals what it left split."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shardwright.runtime.classes import like
from shardwright.runtime.slots import positions
from shardwright.runtime.split_logits import LossScope, Seal

ROOT_CLASSES: dict[type, type] = {}


class RootModule:
    """Mixin in front of the root's own class."""

    _shardwright_scope: LossScope
    _shardwright_labels: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; with labels, logits stay split until it returns."""
        scope, outer = self._shardwright_scope, self._shardwright_scope.seal
        labels = kwargs.get("labels")
        at = self._shardwright_labels
        if at is not None and at < len(args):
            labels = args[at]
        # Dynamo takes nn.CrossEntropyLoss for its own business and wants a tensor: gather, then.
        whole = labels is None or (torch.compiler.is_compiling() and not scope.traceable)
        scope.seal = seal = None if whole else Seal()
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            scope.seal = outer
            if seal is not None:
                seal.closed = True


def wrap_root(model: nn.Module) -> None:
    """Make `model` the root of its split modules, in place; after the last `apply_module`.

    Without a module that was applied with `defer=True` nothing changes.
    """
    if isinstance(model, RootModule):
        return
    states = [m.__dict__.get("_shardwright") for m in model.modules()]
    heads = [s for s in states if s is not None and any(c.head for c in s.outputs)]
    if not heads:
        return
    original = type(model)
    names, _ = positions(original.forward)
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    scope = LossScope(traceable=code is None or "CrossEntropyLoss" not in code.co_names)
    for state in heads:
        state.scope = scope
    model._shardwright_scope = scope  # type: ignore[assignment]
    model._shardwright_labels = names.get("labels")  # type: ignore[assignment]
    if original not in ROOT_CLASSES:
        # The same name: checkpoints and configs record it as the architecture.
        ROOT_CLASSES[original] = type(
            original.__name__,
            (RootModule, original),
            {
                "forward": like(original, RootModule.forward),
                "__doc__": original.__doc__,
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
            },
        )
    model.__class__ = ROOT_CLASSES[original]
