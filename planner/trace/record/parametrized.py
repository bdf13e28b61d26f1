"""Refuse model code that parametrizes modules in its forward with torch's own function.

`runtime/boundary/parametrized.py` replaces that function in `torch.nn.utils.parametrize`. Torch's
own function removes parameters from modules, so that they could no longer be identified by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwright.errors import ModelError


@contextmanager
def refused(root: nn.Module) -> Iterator[None]:
    """Context manager in which parametrizing a module of `root` is an error.

    Raises:
        ModelError: code parametrizes a module.
    """
    known = {id(m): f"'{name}', a {type(m).__name__}," for name, m in root.named_modules()}

    def note(module: nn.Module, name: str, _: Any) -> None:
        if name == "parametrizations" and id(module) in known:
            raise ModelError(
                f"{known[id(module)]} is parametrized while the model runs "
                "by a register_parametrization that was imported before it could be replaced: "
                "call it as torch.nn.utils.parametrize.register_parametrization, or parametrize "
                "the module before"
            )

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
