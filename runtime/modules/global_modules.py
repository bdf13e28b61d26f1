"""Modules that are globals of a model's code, such as `gelu` of `transformers.activations`.

A plan changes modules in place, and other models in the process call such a global, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn

from shardwright.runtime.code.names_in_code import classes_of, globals_of


def unshare_globals(model: nn.Module) -> None:
    """Give `model` copies of its modules without state that are globals of its code.

    Those with parameters, buffers or submodules stay: they are the model's own.
    """
    shared = {id(module) for module in _globals(model)}
    made: dict[int, nn.Module] = {}
    for module in [*model.modules()] if shared else ():
        for name, child in module._modules.items():
            if child is not None and id(child) in shared:
                module._modules[name] = made.setdefault(id(child), _copied(child))


def _globals(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules without state that are globals, or in a container that is one."""
    for file in {cls.__module__ for cls in classes_of(model)}:
        for value in globals_of(file):
            held = value.values() if type(value) is dict else value
            for each in held if type(value) in (dict, list, tuple) else (value,):
                if isinstance(each, nn.Module) and _is_stateless(each):
                    yield each


def _is_stateless(module: nn.Module) -> bool:
    return not (module._parameters or module._buffers or module._modules)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy with hooks of its own."""
    made = copy.copy(module)
    vars(made).update({k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, dict)})
    return made
