"""A torch function mode that makes sizes read off tensors `SourcedInt`s and notes their uses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.graph.trace_sizes import has_rows
from shardwright.planner.trace.data_queries.known_values import OF_SIZES
from shardwright.planner.trace.sizes import size_facts
from shardwright.planner.trace.sizes.expressions import SizeFact, reads_of
from shardwright.planner.trace.sizes.loops import note_parts
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt, expression_of
from shardwright.planner.trace.sizes.size_functions import (
    CONVOLUTIONS,
    COUNTING,
    CREATING,
    INFERRING,
    LITERAL,
    PARTS,
    REPEATING,
    SIZED,
    SPLIT,
    counts_of,
    numbers_of,
)
from shardwright.runtime.scopes import holding


class SizeMode(TorchFunctionMode):
    """Passes plain integers to torch functions, and notes in `provenance` what they came from."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self.provenance = provenance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; sizes in the result are `SourcedInt`s."""
        kwargs, notes = kwargs or {}, self.provenance
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.shape:
            notes.as_dims(args[0], "len(")
            return notes.read(args[0], func(*args))
        if name == "size" and isinstance(args[0], torch.Tensor):
            found = notes.read(args[0], func(args[0]))
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return found if dim is None else found[int(dim)]
        if name == "dim" or (name == "__get__" and func.__self__ is torch.Tensor.ndim):
            notes.as_dims(args[0])
        if (asked := _asked(name, func)) and (sizes := _known(args[0])) is not None:
            return asked(notes.read(args[0], sizes), args[0], *args[1:], **kwargs)
        if name == "__getitem__":
            args = (args[0], _lists_to_slices(args[1]))
        if name == "one_hot":
            out = func(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
            return notes.sized(out, size_facts.of_classes(out, *args, **kwargs))
        if not (_has_sourced(args) or any(_has_sourced(v) for v in kwargs.values())):
            out = func(*args, **kwargs)
            self._note_parts(name, args, kwargs, out)
            facts = size_facts.of_sizes(name, args, kwargs, out) if name in LITERAL else ()
            return notes.sized(out, facts)
        indexes = name == "__getitem__"
        reads = frozenset() if indexes else _reads_in((args, kwargs))
        notes.cutting |= reads
        if name in INFERRING and -1 in _plain(tree_leaves((args[1:], kwargs))):
            notes.inferred |= reads
        with holding(OF_SIZES, reads):
            out = func(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
        return self._noted(name, args, kwargs, out)

    def _noted(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Note how a call uses `SourcedInt`s, and return its result."""
        notes = self.provenance
        if name in CREATING:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, SourcedInt):
                    notes.counted |= reads_of(value.expression)
        for value in numbers_of(name, args, kwargs):
            if isinstance(value, SourcedInt) and name != "arange":
                notes.as_number(value.expression)
            elif isinstance(value, SourcedInt):  # the trial checks attributes
                notes.fixed |= reads_of(value.expression)
        if name in SIZED:
            return notes.sized(out, size_facts.of_sizes(name, args, kwargs, out))
        if name in REPEATING and args:
            x, counts = args[0], counts_of(args, kwargs)
            return notes.sized(out, size_facts.of_repeats(x, counts, out, notes.read(x, x.shape)))
        self._note_parts(name, args, kwargs, out)
        if name in SPLIT:
            parts = size_facts.of_parts(args, kwargs, out)
            return type(out)(notes.sized(x, facts) for x, facts in parts)
        if name in CONVOLUTIONS:
            self._note_groups(name, args, kwargs, out)
        elif name == "__getitem__":
            return notes.sized(out, size_facts.of_slices(args[0], args[1]))
        elif name not in COUNTING:
            for value in [*args, *kwargs.values()]:
                if isinstance(value, SourcedInt):
                    notes.as_number(value.expression)
        return out

    def _note_parts(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Note how many parts a tensor has: code may go through them."""
        if name not in PARTS or not args or _known(x := args[0]) is None:
            return
        notes = self.provenance
        if name == "unbind":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if len(out) == 1:  # no text of a plan has the length of `x[:, ::20]`
                notes.as_lost(expression_of(notes.read(x, x.shape)[dim]))
            return
        by, dim = size_facts.split_by(args, kwargs)
        if name == "split" and isinstance(by, int):
            note_parts(notes, notes.read(x, x.shape)[dim], by, len(out))
        elif isinstance(by, SourcedInt):
            note_parts(notes, by, 1, len(out))

    def _note_groups(self, name: str, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """Note that input channels (output, if transposed) are groups * dim 1 of the kernel."""
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        kernel = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if isinstance(groups, SourcedInt) and groups > 1:
            given = kwargs.get("input", args[0] if args else None)
            channels = out if "transpose" in name else given
            each = expression_of(self.provenance.read(kernel, kernel.shape)[1])
            fact = SizeFact(("*", groups.expression, each), channels.dim() - kernel.dim() + 1)
            self.provenance.sized(channels, [fact])


def _count(sizes: tuple[Any, ...], x: torch.Tensor) -> Any:
    return math.prod(sizes)


def _bytes(sizes: tuple[Any, ...], x: torch.Tensor) -> Any:
    return math.prod(sizes) * x.element_size()


def _length(sizes: tuple[Any, ...], x: torch.Tensor) -> int:
    if sizes and isinstance(size := sizes[0], SourcedInt):  # len() returns a plain int
        size.provenance.as_question(size.expression)
        size.provenance.as_lost(size.expression)
    return len(x)


def _stride(sizes: tuple[Any, ...], x: torch.Tensor, dim: int | None = None) -> Any:
    if not x.is_contiguous():
        return x.stride() if dim is None else x.stride(dim)
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    return strides if dim is None else strides[dim]


ASKED = {"numel": _count, "nelement": _count, "__len__": _length, "stride": _stride}
"""Name of a tensor method -> function that computes its result from the sourced sizes."""


def _asked(name: str, func: Any) -> Any:
    """Return the function that answers a query about sizes other than `shape` and `size`."""
    if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.nbytes:
        return _bytes
    return ASKED.get(name)


def _known(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the sizes of `x`; None if one of them depends on data."""
    return None if has_rows(x.shape) else x.shape


def _plain(value: Any) -> Any:
    if isinstance(value, SourcedInt):
        return value.plain
    if type(value) in (tuple, list):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, torch.Size):
        return torch.Size(_plain(v) for v in value)
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value


def _has_sourced(value: Any) -> bool:
    if isinstance(value, SourcedInt):
        return True
    if isinstance(value, (tuple, list)):
        return any(_has_sourced(v) for v in value)
    return isinstance(value, slice) and any(
        isinstance(v, SourcedInt) for v in (value.start, value.stop, value.step)
    )


def _reads_in(given: Any) -> frozenset[tuple[int, int]]:
    """Return the reads that the sizes among the arguments of a function were computed from."""
    found = (v for v in tree_leaves(given) if isinstance(v, SourcedInt))
    return frozenset().union(*(reads_of(v.expression) for v in found))


def _lists_to_slices(index: Any) -> Any:
    """Rewrite x[..., [-2]] as x[..., -2:-1]: the same elements, in a form that rules can read."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(isinstance(p, (list, torch.Tensor)) for p in parts) != 1:
        return index
    out = []
    for part in parts:
        if isinstance(part, list) and len(part) == 1 and type(part[0]) is int:
            out.append(slice(part[0], part[0] + 1 or None))
        else:
            out.append(part)
    return tuple(out)
