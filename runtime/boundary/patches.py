"""Patches of torch 2.13 and peft 0.21 that split models need. None stays longer than a `with`.

A patch holds for all threads while one of them is inside. So each function here does the same as
the original, except for modules of split and traced models.

    parametrize   a module that is parametrized while it runs keeps its parameter
    cond, loops   run as Python code in a planned call without gradients: torch would compile the
                  split modules in them
    LoraLayer     peft makes adapters for the size of a layer, not for that of its local tensor
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from shardwright.errors import UsageError
from shardwright.runtime.boundary import parametrized
from shardwright.runtime.boundary.module_boundary import boundary_of
from shardwright.runtime.code.names_in_code import every_class_of, names_in
from shardwright.runtime.scopes import Patch

PARAMETRIZE = Patch(
    parametrize,
    {
        "register_parametrization": parametrized.register,
        "remove_parametrizations": parametrized.remove,
    },
)
"""Torch's functions take a parameter out of its module and put another back, which neither a trace
nor a split model could follow. They call no method of the module that could do otherwise."""


COMPILE_AND_CALL = "_hop_compile_and_call"
"""The function of torch that compiles `torch.cond` and loops, and calls the result."""


def _as_python(function: Any, args: Any, kwargs: Any = None) -> Any:
    """Run what `torch.cond` or `torch.while_loop` would compile, or compile it as torch does.

    Raises:
        UsageError: a gradient is wanted, and torch cannot compile it. Its gradients of what is in
            the branch not taken are zeros, and those of Python code would be None.
    """
    python = PYTHON_BODIES.get(getattr(function, "__name__", ""))
    compiled = HIGHER_ORDER.originals[COMPILE_AND_CALL]
    if not IN_PLANNED_CALL.get() or python is None:
        return compiled(function, args, kwargs)
    if not torch.is_grad_enabled():
        return python(*args)
    try:
        return compiled(function, args, kwargs)
    except import_module("torch._dynamo.exc").TorchDynamoException as error:
        out = python(*args)
        if not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(out)):
            return out
        raise UsageError(
            "torch.cond or torch.while_loop runs split modules where gradients are wanted: call "
            "it under torch.no_grad(), or write an `if` or a loop in Python"
        ) from error


def _branch(condition: Any, yes: Any, no: Any, operands: Any) -> Any:
    return yes(*operands) if condition else no(*operands)


def _loop(goes_on: Any, body: Any, carried: Any, more: Any) -> Any:
    while goes_on(*carried, *more):
        carried = tuple(body(*carried, *more))
    return carried


PYTHON_BODIES = {"_cond_op_wrapper": _branch, "_while_loop_op_wrapper": _loop}
"""Function that torch compiles -> what it does with its arguments."""

IN_PLANNED_CALL = ContextVar("IN_PLANNED_CALL", default=False)
"""Whether a planned call runs in this context."""

HIGHER_ORDER = Patch(import_module("torch._higher_order_ops.utils"), {COMPILE_AND_CALL: _as_python})
"""Torch has no setting for it but one that holds for all threads and all compiled functions."""


def control_flow_as_python() -> AbstractContextManager[None]:
    """Inside, in this context, `torch.cond` and `torch.while_loop` run as Python code."""
    return HIGHER_ORDER.active(IN_PLANNED_CALL, True)


NEEDED_BY = {
    "register_parametrization": PARAMETRIZE.active,
    "cond": control_flow_as_python,
    "while_loop": control_flow_as_python,
}
"""Name in a model's methods -> the patch during its calls."""


def patches_for(model: nn.Module) -> Callable[[Any], Any]:
    """Return what puts the patches that the code of `model` needs, if any, around a function."""
    needed = tuple({NEEDED_BY[name] for kind in every_class_of(model) for name in _named(kind)})

    def patched(function: Any) -> Any:
        for patch in needed:
            function = patch()(function)
        return function

    return patched


@functools.cache
def _named(kind: type) -> frozenset[str]:
    """The names in `NEEDED_BY` that methods of a class read."""
    if kind.__module__.startswith(("torch.", "builtins", "shardwright.")):
        return frozenset()
    methods = (inspect.unwrap(getattr(m, "__func__", m)) for m in vars(kind).values())
    codes = (method.__code__ for method in methods if inspect.isfunction(method))
    return frozenset(names_in(codes)) & NEEDED_BY.keys()


def parametrizations_in_place() -> AbstractContextManager[None]:
    """Inside, in this context, parametrized parameters of all modules stay in place."""
    return PARAMETRIZE.active(parametrized.IN_PLACE, True)


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


def adding_adapters() -> AbstractContextManager[None]:
    """Inside, `peft.get_peft_model` adds LoRA adapters to a model that is split already.

    Adapters compute with full tensors, and each rank holds all of them.

    Example:
        with shardwright.adding_adapters():
            model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

    Raises:
        UsageError: peft is not installed.
    """
    return _lora().active()
