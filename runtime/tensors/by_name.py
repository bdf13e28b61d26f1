"""What code of a planned call reads of SplitTensors that it got past attributes.

`self.weight` gives code of a planned call what the plan has there, its local tensor say, but
`parameters()`, `buffers()` and `state_dict()` give SplitTensors. Ops on those read what the
attribute gives. What an op writes to is the local tensor itself.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._guards import CompileContext
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.runtime.scopes import PerThread

NOW: Any = PerThread(attribute=None)
"""Its `attribute` finds, in a planned call of this thread, the attribute that has a SplitTensor. It
returns a function that reads it, or None if no attribute has it."""

METADATA = {
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.dim, Tensor.get_device),
    *(Tensor.element_size, Tensor.requires_grad_, Tensor.register_hook),
    Tensor.register_post_accumulate_grad_hook,
}
"""Methods of what the local and the full tensor have alike, or that only the full one has."""
GETTERS = ("T", "mT", "H", "mH", "real", "imag", "data", "shape")
"""Properties of a tensor that give its values or its size."""


OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
"""Classes of functions that are written in C."""


def is_op(func: Any) -> bool:
    """Whether `func` computes: not `backward`, `torch.autograd.grad` or an autograd.Function."""
    if isinstance(func, OF_C):
        return True
    computes = ("torch.nn.functional", "torch.functional", "torch._tensor")
    return getattr(func, "__module__", None) in computes and func.__name__ != "backward"


def in_place(func: Any) -> bool:
    """Whether `func` writes to its first argument."""
    name = getattr(func, "__name__", "")
    return (
        name in ("__setitem__", "__set__")
        or name.startswith("__i")
        or (name.endswith("_") and not name.endswith("__"))
    )


def as_planned(
    kind: type, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the arguments of `func` with local tensors in place of tensors of class `kind`.

    With a gradient among them, which no attribute has, they are returned as they are.
    """
    attribute = NOW.attribute
    if attribute is None or func in METADATA or not (is_op(func) or _is_getter(func)):
        return args, kwargs
    if CompileContext.try_get() is not None:  # it is dynamo that looks at what it compiles with
        return args, kwargs
    of = {id(x): attribute(x) for x in tree_leaves((args, kwargs)) if isinstance(x, kind)}
    if any(of[id(x)] is None for x in tree_leaves((args, kwargs)) if type(x) is kind):
        return args, kwargs

    def local(stored: Any) -> Any:
        return stored if of[id(stored)] is None else stored._local_tensor

    def planned(stored: Any) -> Any:
        return stored if (read := of[id(stored)]) is None else read()

    written, read = (args[:1], args[1:]) if in_place(func) else ((), args)
    into = {"out": kwargs["out"]} if "out" in kwargs else {}
    written, into = tree_map_only(kind, local, (tuple(written), into))
    read, kwargs = tree_map_only(kind, planned, (tuple(read), {**kwargs}))
    return (*written, *read), {**kwargs, **into}


def _is_getter(func: Any) -> bool:
    if not isinstance(func, types.MethodWrapperType) or func.__name__ != "__get__":
        return False
    return getattr(func.__self__, "__name__", "") in GETTERS
