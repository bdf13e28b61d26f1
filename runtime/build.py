"""Build a model that takes no memory for its parameters, and whose buffers are real and right.

But those that are made of parameters and that checkpoints hold are on meta, as parameters are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import ModelError

M = TypeVar("M", bound=nn.Module)

_PATCHING = threading.RLock()
"""Held while torch's globals are changed: the ranks of a test are threads of one process."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built in here have their parameters on meta; all else is real and on the CPU.

    A parameter moves to meta as it is registered, before anything fills it: `torch.empty` has by
    then reserved addresses and touched no memory. Sending factories to meta instead would also
    catch the buffers that are made with them, and lose their values.
    """
    thread = threading.get_ident()
    moved: Any = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and threading.get_ident() == thread:
            # One parameter registered under two names must stay one.
            if param not in moved:
                moved[param] = _to_meta(param)
            self._parameters[name] = moved[param]

    with _PATCHING:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_on_meta
        try:
            with torch.device("cpu"):
                yield
        finally:
            nn.Module.register_parameter = register


def _to_meta(param: nn.Parameter) -> nn.Parameter:
    out = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(out).update(vars(param))
    return out


def empty_model(
    factory: Callable[..., M], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> M:
    """`factory(*args, **kwargs)` with its parameters on meta and its buffers real, on the CPU.

    Args:
        factory: a model class or a function that builds a model.
        *args: what it is called with.
        dtype: what new floating tensors have by default (`Checkpoint.dtype`, say).
        **kwargs: what it is called with.

    Raises:
        ModelError: a buffer that no checkpoint holds depends on a parameter's value, so that it
            could not be computed.
    """
    with parameters_on_meta(), _default_dtype(dtype):
        model = factory(*args, **kwargs)
    _move_stragglers(model)
    if lost := [name for name, buffer in _transient(model) if buffer.is_meta]:
        raise ModelError(
            f"buffer {lost[0]} of {type(model).__name__} is computed from parameters, which "
            "have no values yet: compute it from the config, or after loading"
        )
    return model


def _transient(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints do not hold, by name."""
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if (buffer := module._buffers.get(name)) is not None:
                yield f"{path}.{name}".lstrip("."), buffer


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _move_stragglers(model: nn.Module) -> None:
    """Move parameters to meta that did not come in through `register_parameter`."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta:
                module._parameters[name] = moved.setdefault(id(param), _to_meta(param))


def model_class(config: Any) -> type[nn.Module]:
    """The class in transformers that `config` says the model has.

    Raises:
        ModelError: the config names none, or one that transformers does not have.
    """
    import transformers

    names = getattr(config, "architectures", None) or []
    if not names:
        raise ModelError(
            f"the config (model_type {getattr(config, 'model_type', None)}) names no class: add "
            '"architectures": ["..."] to its config.json, or pass the class'
        )
    found = getattr(transformers, names[0], None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if getattr(config, "auto_map", None):
        todo = (
            "its code comes with the model, and Shardwright runs no downloaded code: import it "
            "yourself and pass the class"
        )
    else:
        todo = (
            'check "architectures" in its config.json, install the transformers version that '
            "has it, or pass the class"
        )
    raise ModelError(f"transformers {transformers.__version__} has no class {names[0]}: {todo}")
