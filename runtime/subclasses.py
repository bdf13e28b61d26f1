"""Makes subclasses with the name of the original class, and methods with its signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

ITS_OWN = ("__doc__", "__module__", "__qualname__")
"""Attributes that a subclass copies from the original class: libraries use them as keys."""

SHARES = "_shardwright_shares"
"""Attribute of a class: code that sets further ones sets them on the original class."""


def subclass_with(original: type, members: Mapping[str, Any], *front: type) -> type:
    """Make a subclass of `original` with its name.

    Args:
        original: The class.
        members: The members of the subclass.
        front: Bases before `original`.
    """
    return class_like(original, (*front, original), members, type(original))


def class_like(
    named: type, bases: tuple[type, ...], members: Mapping[str, Any], metaclass: Any
) -> type:
    """Make a class with `bases` that has the name of `named`."""
    kept = {name: getattr(named, name) for name in ITS_OWN}
    made: Any = metaclass(named.__name__, bases, {**kept, **members})
    if "forward" in vars(made) and "forward" not in members:
        del made.forward  # a base class has wrapped it again, as it does for subclasses
    return made


@functools.cache
def sharing_attributes(metaclass: Any) -> Any:
    """Make a metaclass whose classes set new attributes on their `_shardwright_original`.

    So `type(self).kept = x` in a module's code is seen by all modules of its class.
    """

    class Sharing(metaclass):
        def __init__(cls, *args: Any, **kwargs: Any) -> None:  # pyright: ignore
            super().__init__(*args, **kwargs)
            type.__setattr__(cls, SHARES, True)

        def __setattr__(cls, name: str, value: Any) -> None:  # pyright: ignore
            # Before __init__, a base class may wrap methods of the new class.
            if name in vars(cls) or name.startswith("__") or SHARES not in vars(cls):
                super().__setattr__(name, value)
            else:
                setattr(cls._shardwright_original, name, value)  # type: ignore[attr-defined]

        def __delattr__(cls, name: str) -> None:  # pyright: ignore
            if name in vars(cls):
                super().__delattr__(name)
            else:
                delattr(cls._shardwright_original, name)  # type: ignore[attr-defined]

    return Sharing


def forwards_into_classes(model: nn.Module) -> None:
    """Give modules with a forward of their own (on the instance) a class that has it, in place.

    So the forward runs within the module's boundary, as that of a class does. This is for functions
    that are bound to their module (`MethodType(f, module)`, `partial(f, module)`). Others may refer
    to any object, and stay where they are.
    """
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, MethodType) and forward.__self__ is module:
            code: Any = forward.__func__
        elif isinstance(forward, partial) and forward.keywords == {} and forward.args == (module,):
            code = _with_self(forward)
        else:
            continue
        if code is not type(module).forward:
            module.__class__ = subclass_with(type(module), {"forward": code})
        del vars(module)["forward"]


def _with_self(forward: partial[Any]) -> FunctionType:
    """Return a method for a function that is bound to its module, with the module's signature."""
    run = forward.func

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    taken = inspect.signature(forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = taken.replace(parameters=[own, *taken.parameters.values()])  # type: ignore[attr-defined]
    return method  # type: ignore[return-value]


def like(original: type, method: FunctionType) -> FunctionType:
    """A copy of `method` with the signature of the method of `original` that has its name.

    generate() and the Trainer read signatures.
    """
    return functools.update_wrapper(copy_of(method), getattr(original, method.__name__))  # type: ignore[return-value]


def copy_of(
    function: FunctionType,
    code: CodeType | None = None,
    closure: tuple[CellType, ...] | None = None,
) -> FunctionType:
    """A copy of `function`, perhaps with another code object or closure."""
    taken = function.__name__, function.__defaults__, closure or function.__closure__
    made = FunctionType(code or function.__code__, function.__globals__, *taken)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    vars(made).update(vars(function))  # perhaps with a `__wrapped__` of its own
    return made
