"""Forwards that are put on modules of a split model (`module.forward = ...`), on whole tensors.

Such code knows of no parts. It is given what a newcomer would be given in the module's place
(`newcomers.py`), and what it reads of parameters is whole; the forward that was there before, which
it may hand on to, is then called by itself. Integers of the module that are those of a rank it must
not ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.code.call_sites import is_of_a_model
from shardwright.runtime.code.closures import held
from shardwright.runtime.code.names_in_code import names_in
from shardwright.runtime.outside.hooks import is_inside
from shardwright.runtime.outside.newcomers import Within, hides_within, on_whole, place_of


class Replaced:
    """A forward that was put on a module: what stands there in its place.

    Args:
        module: The module.
        forward: What was put on it.
        path: The module's name.
        calls: What the modules of its model share.
    """

    def __init__(self, module: nn.Module, forward: Any, path: str, calls: Any) -> None:
        functools.update_wrapper(self, forward)
        self.module, self.code = module, forward
        self.place = place_of(module, calls, path)
        if isinstance(before := vars(module).get("forward"), Replaced):
            before.place.inside = before.place.called = False
        hides_within(module, self.place, calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What that forward gives, of whole tensors.

        Raises:
            UsageError: it is compiled, or it is not known how tensors lie here.
        """
        state = vars(self.module).get("_shardwright")
        if state is not None and state.goes_back and not state.has_originals:
            args = state.originals(args, kwargs) if is_inside(self.place) else args
        return on_whole(self.place, self.code, args, kwargs)


def replaced(module: nn.Module, forward: Any, calls: Any) -> Any:
    """What to keep where `forward` is put on `module`: None where that is its class's own.

    Raises:
        UsageError: it asks for integers of which each rank has its own.
    """
    if _is_own(module, forward):
        return None
    if isinstance(forward, Replaced) and forward is vars(module).get("forward"):
        return forward
    path = next((n for n, m in calls.root.named_modules() if m is module), "")
    asked = {*names_in(_functions(forward, module))}
    local = sorted(n for m in module.modules() for n in _local(m) if n in asked)
    if local:
        raise UsageError(
            f"the forward that is put on '{path}' asks for '{local[0]}', which is that of a part "
            "on each rank of a split model: put it on before the model is planned and split"
        )
    calls.arrived.append(f"a forward on {path}")
    calls.changed = calls.replaced = True
    return Replaced(module, forward, path, calls)


def whole_in_replaced(stored: Tensor, frame: Any, calls: Any) -> Tensor:
    """A parameter as the code in a `frame` should see it, which is not the model's own."""
    ran = set[Any]()
    while frame is not None and isinstance(stored, DTensor):
        ran.add(frame.f_code)
        owner = frame.f_locals.get("self") if frame.f_code is _CALL else None
        if owner is not None and owner.__dict__.get("_shardwright_calls") is calls:
            return stored.full_tensor() if _REPLACED in ran else stored
        frame = frame.f_back
    return stored


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether it is the method of the module's class, or what that was when nothing was put in."""
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    found = (vars(k)["forward"] for k in type(module).__mro__ if "forward" in vars(k))
    for own in found:
        if forward.__func__ is own:
            return True
        if getattr(own, "__code__", None) is not Within.forward.__code__:
            return False
    return False


def _local(module: nn.Module) -> Iterator[str]:
    """The names of the integers of a module of which each rank has its own."""
    state = vars(module).get("_shardwright")
    if state is not None and state.alone is not None:
        yield from (name.split(".")[-1] for name in state.alone.spec.attributes)


def _functions(value: Any, module: nn.Module) -> Iterator[CodeType]:
    """The code of functions that `value` calls: its variables, by name, methods of `module`."""
    todo, known = [value], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, functools.partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            todo += [] if _is_own(module, one) else [one.__func__]
        elif isinstance(one, Replaced):
            todo.append(one.code)
        elif isinstance(one, FunctionType):
            if not is_of_a_model(str(one.__globals__.get("__name__"))):
                continue  # it reads no attributes of modules for who calls it
            yield one.__code__
            todo += held(one)
            for name in names_in([one.__code__]):
                todo.append(one.__globals__.get(name))
                if name != "forward":
                    todo.append(getattr(type(module), name, None))
        elif not isinstance(one, (nn.Module, type, Tensor)) and callable(one):
            todo.append(type(one).__call__)


_CALL = nn.Module._call_impl.__code__
_REPLACED = Replaced.__call__.__code__
