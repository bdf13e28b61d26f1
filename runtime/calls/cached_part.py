"""What is read from a cache of a split model: it may be put elsewhere, and no more.

A rank has its heads there, and no number of them is one of the whole. Code that only sorts caches
(by sequences of a batch, say, to give each out) is right on a part: it may pick, stack and move
what it reads, and fill another cache with it. All else, sizes among it, is refused; caches
themselves may ask for these.
"""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.errors import UsageError

PART = (
    "a cache of a split model holds what this rank computes with, its heads, and no rank has all: "
    "take keys, values and states from the unsplit model"
)

MOVES: frozenset[Any] = frozenset(
    {Tensor.__getitem__, Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.squeeze, Tensor.unsqueeze}
    | {torch.cat, torch.stack, torch.squeeze, torch.unsqueeze}
)
"""They give the same numbers, elsewhere or in another order."""

FACTS: frozenset[Any] = frozenset(
    {Tensor.is_floating_point}
    | {getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad")}
)
"""They are told of a part as of the whole."""

_SHAPE: Any = Tensor.shape
SIZES: frozenset[Any] = frozenset({_SHAPE.__get__, Tensor.numel, Tensor.size, Tensor.dim})
"""They are told to the code of caches."""


class CachedPart(Tensor):
    """A tensor that was read from a cache; see `of`."""

    _shardwright_home = ""
    """The module that the code of that cache is in."""

    @classmethod
    def of(cls, tensor: Tensor, holder: type) -> CachedPart:
        """`tensor` as an object of class `holder`, in a cache, shows it."""
        found = tensor.detach().as_subclass(cls)
        found._shardwright_home = holder.__module__
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What may be done with it.

        Raises:
            UsageError: `func` is nothing of that.
        """
        parts = (x for x in tree_leaves((args, kwargs or {})) if isinstance(x, CachedPart))
        homes = {part._shardwright_home for part in parts}
        asks = sys._getframe(1).f_globals.get("__name__")
        with torch._C.DisableTorchFunctionSubclass():
            if func in FACTS or (func in SIZES and homes == {asks}):
                return func(*args, **(kwargs or {}))
            if func not in MOVES or "out" in (kwargs or {}):
                raise UsageError(f"{getattr(func, '__name__', func)}: {PART}")
            found = func(*args, **(kwargs or {})).as_subclass(cls)
        found._shardwright_home = homes.pop() if len(homes) == 1 else ""
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{PART}>"


def shown(value: Any, holder: type) -> Any:
    """What an attribute of an object in a cache shows: parts for tensors, nothing to write into."""
    if isinstance(value, Tensor):
        return CachedPart.of(value, holder) if value.is_floating_point() else value
    if isinstance(value, dict):
        return MappingProxyType({name: shown(each, holder) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(shown(each, holder) for each in value)
    return value
