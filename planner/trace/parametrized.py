"""Code that parametrizes modules while it runs, as adapters on parameters do: it is not traced.

It gives modules another class for a while (`torch.nn.utils.parametrize`), and takes parameters out
of them and puts them in again, so that nobody could say which tensor is which.
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
    """Within, it is an error.

    Raises:
        ModelError: code of `root` does so.
    """
    known = {id(m): f"'{name}', a {type(m).__name__}," for name, m in root.named_modules()}

    def note(module: nn.Module, name: str, _: Any) -> None:
        if name == "parametrizations" and id(module) in known:
            raise ModelError(
                f"{known[id(module)]} is parametrized while the model runs "
                "(torch.nn.utils.parametrize), which cannot be traced: parametrize it before; put "
                "adapters on linear layers (peft: name them in target_modules)"
            )

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
