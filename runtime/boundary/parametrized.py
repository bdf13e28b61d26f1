"""Supports modules that are parametrized while they run, for example by adapters on parameters.

`torch.nn.utils.parametrize` moves a parameter out of its module and puts it back afterwards, with
another name and perhaps as another object. Neither a trace nor a split model could follow that.
Here the parameter stays in its module. The module temporarily gets a class that reads the parameter
through the parametrization, which sees what the module's code would see: a local tensor. Torch's
functions are replaced by `register` and `remove` while such code runs (`patches.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwright.errors import ModelError
from shardwright.runtime.boundary.module_boundary import boundary_of
from shardwright.runtime.subclasses import subclass_with

TABLE = "parametrizations"
"""The attribute with the parametrizations of a module, by parameter; torch uses the same name."""

IN_PLACE: ContextVar[bool] = ContextVar("in_place", default=False)
"""Whether parametrized parameters of all modules stay in place, as while a model is traced."""

_register, _remove = parametrize.register_parametrization, parametrize.remove_parametrizations


class InPlace(parametrize.ParametrizationList):
    """The parametrizations of a parameter that stays in its module; `see` returns it."""

    def __init__(self, see: Callable[[], Tensor]) -> None:
        nn.ModuleList.__init__(self)
        self.unsafe, self.is_tensor, self.ntensors = False, True, 1
        self.see = see
        self.kept: tuple[Any, int, Tensor] | None = None

    @property
    def original(self) -> Tensor:  # type: ignore[override]  # pyright: ignore
        """The parameter as the module's code would see it."""
        return self.see()

    def value(self) -> Tensor:
        """What code reads for the parameter. Inside torch's `cached()` it is computed once."""
        if not parametrize._cache_enabled:
            return self()
        table, kept = parametrize._cache, self.kept
        if kept is None or kept[0] is not table or kept[1] != len(self):
            self.kept = kept = (table, len(self), self())
        return kept[2]


@functools.cache
def _reading(plain: type, names: tuple[str, ...]) -> type:
    """A subclass of `plain` that reads the parameters `names` through their parametrizations."""
    reads = {n: property(lambda self, n=n: self.__dict__[TABLE][n].value()) for n in names}
    return subclass_with(plain, {**reads, "_shardwright_plain": plain})


def _read(module: nn.Module) -> None:
    """Give `module` the class for its table of parametrizations; its own if that is empty."""
    plain = getattr(type(module), "_shardwright_plain", type(module))
    names = tuple(module.__dict__[TABLE])
    if not names:
        del module.__dict__[TABLE]
    object.__setattr__(module, "__class__", _reading(plain, names) if names else plain)


def values(module: nn.Module) -> list[Tensor]:
    """What code of `module` reads for its parametrized parameters."""
    return [each.value() for each in module.__dict__.get(TABLE, {}).values()]


def _stored(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer as the module's class without parametrizations reads it."""
    found = getattr(getattr(type(module), "_shardwright_plain", type(module)), name, None)
    if isinstance(found, property):
        assert found.fget is not None
        return found.fget(module)
    home: Any = module._parameters if name in module._parameters else module._buffers
    return home[name]


def _stays(module: nn.Module) -> bool:
    """Whether parameters of `module` stay in place: it is traced, or its split model runs."""
    if IN_PLACE.get():
        return True
    boundary = boundary_of(module)
    return boundary is not None and boundary.call.active


def register(
    module: nn.Module, tensor_name: str, parametrization: nn.Module, *, unsafe: bool = False
) -> nn.Module:
    """`register_parametrization` that keeps parameters in place while a model is traced or runs.

    Raises:
        ModelError: the parametrization would write to the parameter (`right_inverse`), or the
            module was parametrized before the model ran.
        ValueError: the parametrization changes dtype or shape, as in torch.
    """
    there = tensor_name in module._parameters or tensor_name in module._buffers
    if not _stays(module) or not there:
        return _register(module, tensor_name, parametrization, unsafe=unsafe)
    writes = hasattr(parametrization, "right_inverse")
    if writes or TABLE in module._modules:
        why = "which writes to it (right_inverse)" if writes else "in addition to an earlier one"
        raise ModelError(
            f"'{tensor_name}' of a {type(module).__name__} is parametrized while the model runs by "
            f"a {type(parametrization).__name__}, {why}: do this before the model is planned"
        )
    parametrization.train(module.training)
    before = getattr(module, tensor_name)
    if not unsafe:
        made = parametrization(before)
        if (made.dtype, made.shape) != (before.dtype, before.shape):
            raise ValueError(
                f"a parametrization gives a tensor of {made.dtype} and shape {list(made.shape)} "
                f"for '{tensor_name}', of {before.dtype} and shape {list(before.shape)}"
            )
    table = module.__dict__.setdefault(TABLE, nn.ModuleDict())
    if tensor_name not in table:
        table[tensor_name] = InPlace(functools.partial(_stored, module, tensor_name))
    table[tensor_name].append(parametrization)
    _read(module)
    return module


def remove(module: nn.Module, tensor_name: str, leave_parametrized: bool = True) -> nn.Module:
    """`remove_parametrizations` for parameters that `register` kept in place.

    Raises:
        ModelError: the parameter would be written to (`leave_parametrized`).
    """
    table = module.__dict__.get(TABLE)
    if table is None or tensor_name not in table:
        return _remove(module, tensor_name, leave_parametrized)
    if leave_parametrized:
        raise ModelError(
            f"removing a parametrization would write to '{tensor_name}' of a "
            f"{type(module).__name__} while the model runs: pass leave_parametrized=False"
        )
    del table[tensor_name]
    _read(module)
    return module
