"""All patches of other packages: torch 2.13 and peft 0.21. None stays longer than a `with`.

A patch holds for all threads while one of them is inside. So each function here does the same as
the original, except for modules of split and traced models.

    parametrize   a module that is parametrized while it runs keeps its parameter
    LoraLayer     peft makes adapters for the size of a layer, not for that of its local tensor
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from shardwright.errors import UsageError
from shardwright.runtime.boundary import parametrized
from shardwright.runtime.boundary.module_boundary import boundary_of


class Patch:
    """Functions in the place of those of a module or class, while some thread is inside `active`.

    Args:
        owner: The module or class.
        functions: The new functions, by name.
    """

    def __init__(self, owner: Any, functions: Mapping[str, Any]) -> None:
        self.owner, self.functions = owner, functions
        self.originals = {name: getattr(owner, name) for name in functions}
        self.lock, self.inside = threading.Lock(), 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the functions are replaced."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self.lock:
            self.inside += change
            for name, function in (self.functions if self.inside else self.originals).items():
                setattr(self.owner, name, function)


PARAMETRIZE = Patch(
    parametrize,
    {
        "register_parametrization": parametrized.register,
        "remove_parametrizations": parametrized.remove,
    },
)
"""Torch's functions take a parameter out of its module and put another back, which neither a trace
nor a split model could follow. They call no method of the module that could do otherwise."""


@contextmanager
def in_place() -> Iterator[None]:
    """Inside, in this context, parametrized parameters of all modules stay in place."""
    token = parametrized.IN_PLACE.set(True)
    try:
        with PARAMETRIZE.active():
            yield
    finally:
        parametrized.IN_PLACE.reset(token)


@functools.cache
def _lora() -> Patch:
    """The patch of peft, which asks weights that are DTensors for the sizes of their local tensors.

    But adapters in a split model compute with full tensors. Peft has no setting for that.

    Raises:
        UsageError: peft is not installed, or has no such class.
    """
    try:
        layer = import_module("peft.tuners.lora.layer").LoraLayer
        own = layer._get_in_out_features
    except (ImportError, AttributeError) as error:
        raise UsageError(f"adapters need peft 0.21: {error}") from None

    def sizes(self: Any, module: nn.Module) -> Any:
        if boundary_of(module) is None or not isinstance(module, nn.Linear):
            return own(self, module)
        return module.in_features, module.out_features

    return Patch(layer, {own.__name__: sizes})


@contextmanager
def adding_adapters() -> Iterator[None]:
    """Inside, `peft.get_peft_model` adds LoRA adapters to a model that is split already.

    Adapters compute with full tensors, and each rank holds all of them.

    Example:
        with shardwright.adding_adapters():
            model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

    Raises:
        UsageError: peft is not installed.
    """
    with _lora().active():
        yield
