"""What model code asks of tensors while there is no data: every function that reads off one.

Its answers are those of `numbers.py`, and of constants their values.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardwright.planner.graph.trace_sizes import TRACE_ROWS, has_rows
from shardwright.planner.trace.data_queries.branch_paths import answer_for_all
from shardwright.planner.trace.data_queries.drawn_arrays import DrawnArray
from shardwright.planner.trace.data_queries.known import on_data
from shardwright.planner.trace.data_queries.loops import known
from shardwright.planner.trace.data_queries.model_code import (
    is_message,
    is_plumbing,
    torch_raises,
)
from shardwright.planner.trace.data_queries.numbers import Listed, Number, Questions
from shardwright.planner.trace.data_queries.unknown import Unknown
from shardwright.planner.trace.queries.gradient_reads import given_back
from shardwright.planner.trace.queries.training_reads import harmless

WRAPPERS = ("torch.overrides", "torch._tensor", __name__)
"""Modules through which functions of tensors are called."""


NUMBERS = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__format__"}
"""What makes a number of a tensor."""


REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""What tells whether a tensor wants a gradient: code may do something else where it does."""

LENGTHS = {"__get__", "size", "numel", "nelement", "__len__"}
"""What tells how long a tensor is; the first is `shape`."""

ASKING = {*NUMBERS, *LENGTHS} | set(
    """
register_hook tensor as_tensor from_numpy nonzero argwhere where __getitem__ unbind squeeze flatten
numpy
""".split()
)
"""All that may be answered here."""

JOINING = set("cat concat concatenate hstack vstack pad narrow unfold diff __getitem__".split())
"""What makes tensors of other lengths out of the lengths of others."""


class Asked(TorchFunctionMode):
    """Within, reading a number off a tensor without data gives a `Number`."""

    def __init__(self, questions: Questions) -> None:
        super().__init__()
        self.questions = questions
        self.selects = False
        """Whether any tensor is as long as data says."""
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        """By id, rows of indices that a mask of one dim selects, and the mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Numbers read, truths asked, tensors cut by numbers; all other functions as they are."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and not self.selects and func != REQUIRES_GRAD:
            return func(*args)
        if name in ASKING:
            return self._answer(name, func, args, kwargs)
        return self._handed_on(name, func, args, kwargs)

    def _answer(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function of `ASKING` gives."""
        if name in NUMBERS and known(args[0]):
            return format(args[0].item(), *args[1:]) if name == "__format__" else func(*args)
        if name == "__format__" and self.questions.value(args[0]) is None and _writes_a_message():
            self.questions.read(args[0])
            return "?"
        if name == "register_hook":
            self.questions.hooked(args[0])
            return RemovableHandle(OrderedDict())
        if name == "__get__" and func == REQUIRES_GRAD and (frame := _asking_model()) is not None:
            idle = harmless(frame) or given_back(frame.f_code.co_filename, frame.f_lineno)
            found = None if idle else answer_for_all("requires_grad")
            return func(*args) if found is None else found
        if name in ("tensor", "as_tensor", "from_numpy") and isinstance(args[0], DrawnArray):
            return args[0].tensor(func, kwargs)
        if name == "tensor" and torch.device(kwargs.get("device") or "cpu").type == "meta":
            return self._constant(func, *args, **kwargs)
        if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1 and not kwargs):
            with suppress(DynamicOutputShapeException):  # it may have a value without data
                return func(*args, **kwargs)
            return self._select(name, *args, **kwargs)
        if name == "__getitem__" and (masks := _masks(args[1])):
            with suppress(DynamicOutputShapeException):
                return func(*args)
            return self._by_mask(func, args[0], args[1], masks)
        if name == "unbind" and id(args[0]) in self.selected and _iterates():
            return self.questions.passes(self.selected[id(args[0])][1], args[0])
        if name in ("squeeze", "flatten") and args and id(args[0]) in self.selected:
            out = func(*args, **kwargs)
            self._selects(out, self.selected[id(args[0])][1])
            return out
        is_length = name in LENGTHS and (name != "__get__" or _is_shape(func))
        if self.selects and is_length and isinstance(args[0], Tensor) and _asked_by_model():
            return self._lengths(name, func, *args, **kwargs)
        if name in ("item", "tolist", "__bool__") and isinstance(args[0], Tensor):
            if (value := self.questions.value(args[0])) is not None:
                with on_data():
                    return func(value)
            self.questions.read(args[0])
            if name == "__bool__":
                return self.questions.answer()
            dtype = args[0].dtype
            if name == "item" and dtype == torch.bool and torch_raises():
                return True
            kind = float if dtype.is_floating_point else bool if dtype == torch.bool else int
            return self._numbers(tuple(args[0].shape) if name == "tolist" else (), kind)
        if name == "numpy" and isinstance(args[0], Tensor) and not known(args[0]):
            raise Unknown("it takes what only data has to numpy")
        return self._handed_on(name, func, args, kwargs)

    def _handed_on(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives that is asked nothing, unless it is given what only data has."""
        if not (_has_number(args) or (kwargs and _has_number(kwargs))):
            out = func(*args, **kwargs)
            if self.selects and name in JOINING:
                _refuse_joined((args, kwargs), out)
            return out
        if name in ("split", "split_with_sizes"):
            return self._split(func, *args, **kwargs)
        raise Unknown(f"{name} is given a number that only data has")

    def _constant(self, func: Any, data: Any, **kwargs: Any) -> Tensor:
        """A tensor of numbers; on meta torch forgets them at once."""
        out = func(data, **kwargs)
        if all(isinstance(n, (int, float)) and type(n) is not Number for n in tree_leaves(data)):
            with on_data():
                self.questions.keep(out, torch.tensor(data, dtype=out.dtype))
        return out

    def _select(self, name: str, x: Tensor, as_tuple: bool = False) -> Any:
        """Where `x` is true: so many rows as data says."""
        self.questions.read(x)
        self.selects = True
        shape = (TRACE_ROWS,) if name == "where" or as_tuple else (TRACE_ROWS, x.dim())
        count = x.dim() if name == "where" or as_tuple else 1
        made = tuple(x.new_empty(shape, dtype=torch.int64) for _ in range(count))
        for rows in made:
            self.questions.cut(rows, 0)
            if x.dim() == 1:
                self._selects(rows, x)
        return made if name == "where" or as_tuple else made[0]

    def _selects(self, rows: Tensor, mask: Tensor) -> None:
        """Note that `mask` selects `rows`."""
        self.selected[id(rows)] = rows, mask
        if rows.dim() == 1:
            rows.tolist = partial(self._listed, rows, mask)  # type: ignore[method-assign]

    def _listed(self, rows: Tensor, mask: Tensor) -> Listed:
        """The list of `rows` that `mask` selects."""
        self.questions.read(rows)
        return Listed(partial(self.questions.passes, mask, rows, listed=True))

    def _by_mask(self, func: Any, x: Tensor, index: Any, masks: list[Tensor]) -> Tensor:
        """What a mask selects of `x`: what its rows of indices select."""
        if len(masks) > 1:
            raise Unknown("several masks say how many rows there are")
        has_value = self.questions.value(masks[0]) is not None
        rows = torch.where(masks[0]) if has_value else self._select("where", masks[0])
        parts = index if isinstance(index, tuple) else (index,)
        return func(x, tuple(i for p in parts for i in (rows if p is masks[0] else (p,))))

    def _lengths(self, name: str, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The sizes of `x`, those that only data has among them."""
        sizes = tuple(x.size())
        if not has_rows(sizes):
            return func(x, *args, **kwargs)
        if name == "__len__":
            return self.questions.length(sizes[0]) if has_rows(sizes[:1]) else sizes[0]
        if name in ("numel", "nelement"):
            return Number(self.questions, int)
        number = Number(self.questions, int)
        found = tuple(number if has_rows([n]) else n for n in sizes)
        dim = kwargs.get("dim", args[0] if args and name == "size" else None)
        return found if dim is None else found[dim]

    def _numbers(self, shape: tuple[int, ...], kind: type) -> Any:
        if not shape:
            return Number(self.questions, kind)
        return [self._numbers(shape[1:], kind) for _ in range(shape[0])]

    def _split(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Into parts of made-up sizes, as equal as can be."""
        if not isinstance(sizes, (list, tuple)):  # but `Listed`, or a number
            raise Unknown("the number of parts depends on data")
        stated = sum(n for n in sizes if type(n) is not Number)
        count = sum(type(n) is Number for n in sizes)
        rest = int(x.shape[dim]) - int(stated)
        if rest < 0:
            raise Unknown("parts are larger than the whole")
        made = iter(rest // count + (i < rest % count) for i in range(count))
        parts = func(x, [next(made) if type(n) is Number else n for n in sizes], dim)
        for part in parts:
            self.questions.cut(part, dim % x.dim())
        return parts


def _has_number(value: Any) -> bool:
    """Whether there is a `Number` in arguments; every function that is called asks for it."""
    for part in value.values() if isinstance(value, dict) else value:
        if type(part) in (Number, Listed):
            return True
        if isinstance(part, (tuple, list, dict)) and _has_number(part):
            return True
    return False


def _masks(index: Any) -> list[Tensor]:
    """The masks in an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.bool and p.dim()]


def _refuse_joined(given: Any, made: Any) -> None:
    """Refuse a length that is neither one that data says nor one that was there before."""
    sizes = {n for leaf in tree_leaves(given) if isinstance(leaf, Tensor) for n in leaf.size()}
    if not has_rows(sizes) or not isinstance(made, Tensor):
        return
    if any(n > 1 and not has_rows([n]) and n not in sizes for n in made.size()):
        raise Unknown("it joins rows that data selects, or takes some of them")


def _asked_by_model() -> bool:
    """Whether the function that is called now is called by model code itself."""
    return _asking_model() is not None


def _asking_model() -> Any:
    """The frame of model code that itself calls the function that is called now, if any does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name != "__torch_function__" and module not in WRAPPERS:
            return None if is_plumbing(module) else frame
        frame = frame.f_back
    return None


def _writes_a_message() -> bool:
    """Whether model code asks for the text of a tensor for a message, which nothing else reads."""
    frame = _asking_model()
    return frame is not None and is_message(frame)


def _iterates() -> bool:
    """Whether the function that is called now is called for a loop over a tensor."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "") == __name__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and frame.f_code is torch.Tensor.__iter__.__code__


def _is_shape(getter: Any) -> bool:
    return getattr(getter, "__self__", None) is torch.Tensor.shape
