"""Answers to queries of model code about tensor data in a trace. `ANSWERS` lists the functions.

If the value of a tensor is known without data (`known_values.py`), the answer is that value. Else:

| query | answer | consequence |
|---|---|---|
| `x.item()`, `x.tolist()` | a stand-in for a number | `x` is readable: all ranks read the same |
| truth of that, or of `x`, if one side raises | the side that does not raise | none |
| truth that skips code | the side that runs the code | the code is a conditional region |
| truth of which both sides go on | both, in two runs | the plan must hold for both |
| `nonzero`, `where(mask)`, `x[mask]` | `TRACE_ROWS` rows | that dim is never sharded |
| the number of these rows | a stand-in, or a number to skip by | as for truth |
| `x.split(counts)` | parts of made-up sizes | that dim is never sharded |
| a loop over selected rows | one pass for each row | the loop is a conditional region |
| `x.requires_grad` | both, in two runs | the plan must hold for both |
| `p.data = x` | `p.copy_(x)` | the parameter keeps its placement, and `x` has it |
| `p.grad`, `p.requires_grad_()`, `p.register_hook(f)` | as if there were no backward pass | |

Any other query raises `NeedsData`: the module then becomes one replicated op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from shardwright.planner.graph.trace_sizes import TRACE_ROWS, has_rows
from shardwright.planner.trace.data_queries import branch_paths
from shardwright.planner.trace.data_queries.conditional_code import Refused, loop_over_rows
from shardwright.planner.trace.data_queries.conditional_regions import (
    Regions,
    inner,
    known,
    tensors_of,
)
from shardwright.planner.trace.data_queries.errors import BranchesOnData, NeedsData
from shardwright.planner.trace.data_queries.known_values import OF_SIZES, KnownValues, on_data
from shardwright.planner.trace.data_queries.model_code import (
    answer_that_goes_on,
    may_be_caught,
    model_frame,
)
from shardwright.planner.trace.data_queries.stand_ins import DataList, DataNumber
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.python_draws import note_data
from shardwright.planner.trace.queries.harmless import given_back, harmless
from shardwright.planner.trace.record.record import Record
from shardwright.planner.trace.time_limit import check_time

REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""The getter of `requires_grad`: code may branch on it."""

SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""The setter of `data`, which calls no op."""
OF_LEAVES = (torch.Tensor.grad, torch.Tensor.is_leaf, torch.Tensor.grad_fn)
"""Properties that a parameter has, and that a tensor computed from it does not have."""

JOINING = set("cat concat concatenate hstack vstack pad narrow unfold diff __getitem__".split())
"""Functions whose results have new lengths, computed from the lengths of their operands."""

UNINITIALIZED = {"empty", "new_empty", "empty_like"}
"""Functions whose results model code fills itself."""


class DataQueries(TorchFunctionMode):
    """Mode that answers queries of model code about tensors without data.

    Args:
        opaque: Says whether numbers get stand-ins, and notes if one was given.
        values: The values of tensors that are known without data.
        record: The calls so far; notes which tensors are read and cut.
        hooked: Called with each tensor on which code registers a gradient hook.
        assigned: Called with each tensor whose `data`, flag, gradient or hooks code sets or reads;
            returns whether it is a parameter or buffer.
    """

    def __init__(
        self,
        opaque: Opaque,
        values: KnownValues,
        record: Record | None = None,
        hooked: Callable[[Tensor], None] = lambda x: None,
        assigned: Callable[[Tensor], bool] = lambda x: True,
    ) -> None:
        super().__init__()
        self.opaque, self.values, self.hooked, self.assigned = opaque, values, hooked, assigned
        self.record = noted = record or Record([])
        self.regions = Regions(lambda: len(noted.calls))
        self.selects = False
        """Whether any tensor has a length that depends on data."""
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        """By id: row indices that a mask of one dim selects, and the mask."""
        self.checked: dict[int, Tensor] = {}
        """By id: results of torch's checks, which raise if the result is not true."""
        self.loops: list[Generator[Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a function in `ANSWERS`; call any other function, if it gets no stand-in."""
        check_time()
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and not self.selects and func != REQUIRES_GRAD:
            if func.__self__ in OF_LEAVES and model_frame(calls_itself=True) is not None:
                self.assigned(args[0])
            return func(*args)
        if name in ANSWERS and args:
            found = ANSWERS[name](self, func, args, kwargs)
            if found is not NotImplemented:
                return found
        if _has_stand_in(args) or (kwargs and _has_stand_in(kwargs)):
            if name in ("split", "split_with_sizes"):
                return self._split(func, *args, **kwargs)
            raise NeedsData(f"{name} is called with a number that depends on data")
        out = func(*args, **kwargs)
        if name in UNINITIALIZED and model_frame(calls_itself=True) is not None:
            self.values.keep_uninitialized(inner(out))
        if self.selects and name in JOINING:
            _refuse_joined((args, kwargs), out)
        return out

    def __exit__(self, *error: Any) -> None:
        """Close loops that were still running when code failed."""
        for loop in self.loops:
            loop.close()
        super().__exit__(*error)

    def value(self, x: Tensor) -> Tensor | None:
        """Return the value of a tensor that is known without data, or None."""
        return self.values.value(inner(x))

    def read(self, x: Tensor) -> None:
        """Note that code reads the values of a tensor.

        Raises:
            NeedsData: numbers get no stand-ins.
        """
        if not self.opaque.stand_ins:
            raise NeedsData("it reads numbers off data")
        self.opaque.stood_in = True
        self.record.read.append(inner(x))

    def answer(self) -> bool:
        """Return the answer to the current branch on data with which the code goes on.

        Raises:
            NeedsData: no answer can be chosen; `BranchesOnData` if both sides go on.
        """
        if (frame := model_frame()) is None:
            raise NeedsData("it branches on data")
        found = answer_that_goes_on(frame.f_code.co_filename, frame.f_lineno)
        if found is None and (self.regions.passes or self.opaque.skips):
            found = self.regions.skippable(frame)
        if found is None and self.regions.passes:
            raise NeedsData("it branches on data in a pass of a loop over rows")
        if found is None:
            traced_call, found = branch_paths.answer()
            if found is None:
                raise BranchesOnData(traced_call, (frame.f_code.co_filename, frame.f_lineno))
        return found

    def _set(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer an assignment to a property of a tensor."""
        x, value = args
        if func != SET_DATA:
            of = getattr(func, "__self__", None)
            if of is torch.Tensor.requires_grad:
                return self._flag(func, args, kwargs)
            if of is torch.Tensor.grad:
                self.assigned(x)
            return NotImplemented
        if inner(value) is inner(x):  # `Module.to` sets what it leaves as it is
            return None
        if not self.assigned(x):
            raise NeedsData("it sets the data of a tensor that is no parameter")
        if value.shape != x.shape:
            raise NeedsData("it sets the data of a tensor to one of another shape")
        with torch.no_grad():
            return x.copy_(value)

    # --- numbers

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `item`, `tolist` and `__bool__`."""
        (x,) = args
        if known(x):
            return func(x)
        if (value := self.values.look(inner(x))) is not None:
            with on_data():
                return func(value)
        self.read(x)
        if id(x) in self.checked:
            return True
        if func.__name__ == "__bool__":
            return self.answer()
        kind = float if x.dtype.is_floating_point else bool if x.dtype == torch.bool else int
        return self._numbers(x.shape if func.__name__ == "tolist" else (), kind)

    def _numbers(self, shape: Sequence[int], kind: type) -> Any:
        if not shape:
            return DataNumber(self.answer, kind)
        return [self._numbers(shape[1:], kind) for _ in range(shape[0])]

    def _check(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `_is_all_true` in torch's checks, which raise if it is false."""
        if (frame := model_frame()) is None or model_frame(calls_itself=True) is not None:
            return NotImplemented
        if may_be_caught(frame.f_code.co_filename, frame.f_lineno):
            return NotImplemented
        out = func(*args)
        self.checked[id(out)] = out
        return out

    def _text(self, func: Any, x: Any, kwargs: Any) -> Any:
        """Answer `f"{x}"` and `f"{x:.3f}"`; without digits, torch writes no number."""
        if known(x[0]):
            return format(x[0].item(), *x[1:])
        if x[0].dim() or not any(x[1:]):
            return NotImplemented
        return format(self._number(torch.Tensor.item, x[:1], kwargs), *x[1:])

    def _spectrum(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `stft` with its window where its input is: torch asks before it calls any op."""
        place = args[0].device

        def moved(x: Tensor) -> Tensor:
            return x if x.device == place else x.to(place)

        args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
        return func(*args, **kwargs)

    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `requires_grad` and `shape`."""
        if func != REQUIRES_GRAD:
            is_shape = getattr(func, "__self__", None) is torch.Tensor.shape
            return self._length(func, args, kwargs) if is_shape else NotImplemented
        frame = model_frame(calls_itself=True)
        if frame is None or harmless(frame):
            return NotImplemented
        if given_back(frame.f_code.co_filename, frame.f_lineno):
            return NotImplemented
        self.assigned(args[0])  # what code sees of a parameter requires none under no_grad
        found = branch_paths.answer_for_all("requires_grad")
        return NotImplemented if found is None else found

    def _hook(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.assigned(args[0]):
            self.hooked(args[0])
        return RemovableHandle(OrderedDict())

    def _flag(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note that code sets `requires_grad`, if to something else."""
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        if REQUIRES_GRAD(args[0]) != wanted:
            self.assigned(args[0])
        return NotImplemented

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `torch.tensor` and keep the value: on meta torch drops it at once."""
        note_data(args[0])
        if torch.device(kwargs.get("device") or "cpu").type != "meta":
            return NotImplemented
        out, numbers = func(*args, **kwargs), tree_leaves(args[0])
        if all(isinstance(n, (int, float)) and type(n) is not DataNumber for n in numbers):
            with on_data():
                value = torch.tensor(args[0], dtype=out.dtype)
                self.values.keep(inner(out), value, fixed=OF_SIZES.get() is None)
        return out

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what a tensor is made of."""
        note_data(args[-1] if args else kwargs)
        return NotImplemented

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not known(args[0]):
            raise NeedsData("it converts a tensor that depends on data to NumPy")
        return NotImplemented

    def _split(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Split a tensor into parts of made-up sizes, as equal as possible."""
        if not isinstance(sizes, (list, tuple)):  # a stand-in
            raise NeedsData("the number of parts depends on data")
        stated = sum(n for n in sizes if type(n) is not DataNumber)
        count = sum(type(n) is DataNumber for n in sizes)
        rest = int(x.shape[dim]) - int(stated)
        if rest < 0:
            raise NeedsData("it splits a dim into parts that are larger than the dim")
        made = iter(rest // count + (i < rest % count) for i in range(count))
        parts = func(x, [next(made) if type(n) is DataNumber else n for n in sizes], dim)
        self.record.cut.extend((inner(part), dim % x.dim()) for part in parts)
        return parts

    # --- rows that a mask selects

    def _select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `nonzero`, `argwhere`, and `where` of a mask alone with `TRACE_ROWS` rows."""
        if func.__name__ == "where" and (len(args) > 1 or kwargs):
            return NotImplemented
        with suppress(DynamicOutputShapeException):  # the value may be known without data
            return func(*args, **kwargs)
        by_dim = func.__name__ == "where" or kwargs == {"as_tuple": True}
        return self._selected(args[0], by_dim)

    def _selected(self, x: Tensor, by_dim: bool) -> Any:
        self.read(x)
        self.selects = True
        shape = (TRACE_ROWS,) if by_dim else (TRACE_ROWS, x.dim())
        made = [x.new_empty(shape, dtype=torch.int64) for _ in range(x.dim() if by_dim else 1)]
        for rows in made:
            self.record.cut.append((inner(rows), 0))
            if x.dim() == 1:
                self._note_selected(rows, x)
        return tuple(made) if by_dim else made[0]

    def _note_selected(self, rows: Tensor, mask: Tensor) -> None:
        """Note that `mask` selects `rows`."""
        self.selected[id(rows)] = rows, mask
        if rows.dim() == 1:
            rows.tolist = partial(self._listed, rows, mask)  # type: ignore[method-assign]

    def _listed(self, rows: Tensor, mask: Tensor) -> DataList:
        self.read(rows)
        return DataList(partial(self._passes, mask, lambda number: number))

    def _same_rows(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `squeeze` and `flatten` of row indices."""
        if id(args[0]) not in self.selected:
            return NotImplemented
        out = func(*args, **kwargs)
        self._note_selected(out, self.selected[id(args[0])][1])
        return out

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Index with a mask: replace the mask by the row indices that it selects.

        In an index of a tensor whose value is known, lists become tensors whose value is known.
        """
        x, index = args
        parts = index if isinstance(index, tuple) else (index,)
        if any(map(_is_list, parts)) and x.is_meta and self.value(x) is not None:
            on = {"device": x.device}
            made = (self._constant(torch.tensor, (p,), on) if _is_list(p) else p for p in parts)
            return func(x, tuple(made))
        masks = [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.bool and p.dim()]
        if not masks:
            return self._row_of(x, parts) if self.regions.passes else NotImplemented
        with suppress(DynamicOutputShapeException):
            return func(x, index)
        if len(masks) > 1:
            raise NeedsData("it indexes a tensor with several boolean masks at once")
        has_value = self.value(masks[0]) is not None
        rows = torch.where(masks[0]) if has_value else self._selected(masks[0], by_dim=True)
        return func(x, tuple(i for p in parts for i in (rows if p is masks[0] else (p,))))

    def _row_of(self, x: Tensor, parts: tuple[Any, ...]) -> Any:
        """Index in a pass of a loop over rows; the first row stands for one that is out of bounds.

        A real pass over such a row raises on every rank.
        """
        try:
            return x[parts]
        except IndexError:
            return x[tuple(0 if _is_number(p) else p for p in parts)]

    def _length(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer size queries; sizes that depend on data are stand-ins."""
        if not self.selects or (frame := model_frame(calls_itself=True)) is None:
            return NotImplemented
        (x, *at), name = args, func.__name__
        sizes = tuple(x.size())
        if not has_rows(sizes[:1] if name == "__len__" else sizes):
            return NotImplemented
        if name == "__len__":
            if self.regions.skippable(frame, sizes[0]) is None:
                raise NeedsData("it takes the number of rows that data selects")
            return sizes[0]
        number = DataNumber(self.answer, int)
        if name in ("numel", "nelement"):
            return number
        found = tuple(number if has_rows([n]) else n for n in sizes)
        dim = kwargs.get("dim", at[0] if at and name == "size" else None)
        return found if dim is None else found[dim]

    # --- loops over rows

    def _iterate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer `unbind`, which a loop over a tensor calls."""
        x = args[0]
        if id(x) not in self.selected:
            return NotImplemented

        def row(number: int) -> Tensor:
            return torch.tensor(number if x.dim() == 1 else [number])

        return self._passes(self.selected[id(x)][1], row)

    def _passes(self, mask: Tensor, row: Callable[[int], Any]) -> Iterator[Any]:
        """Return the rows that `mask` (of one dim) may select: there is one pass for each.

        Raises:
            NeedsData: a pass may depend on which other passes run.
        """
        if (frame := model_frame()) is None:
            raise NeedsData("it loops over rows that data selects")
        try:
            tensors = tensors_of(frame.f_locals)
            code = loop_over_rows(frame.f_code.co_filename, frame.f_lineno, tensors)
        except Refused as refused:
            raise NeedsData(str(refused)) from refused
        loop = self.regions.loop(mask, frame, code, map(row, range(int(mask.shape[0]))))
        self.loops.append(loop)
        return loop


ANSWERS: Mapping[str, Callable[[DataQueries, Any, Any, Any], Any]] = {
    **dict.fromkeys(("item", "tolist", "__bool__"), DataQueries._number),
    "_is_all_true": DataQueries._check,
    "__format__": DataQueries._text,
    "__get__": DataQueries._attribute,
    "__set__": DataQueries._set,
    **dict.fromkeys(("size", "numel", "nelement", "__len__"), DataQueries._length),
    "register_hook": DataQueries._hook,
    "requires_grad_": DataQueries._flag,
    "tensor": DataQueries._constant,
    **dict.fromkeys(("as_tensor", "asarray", "new_tensor"), DataQueries._made),
    "numpy": DataQueries._numpy,
    **dict.fromkeys(("stft", "istft"), DataQueries._spectrum),
    **dict.fromkeys(("nonzero", "argwhere", "where"), DataQueries._select),
    "__getitem__": DataQueries._index,
    **dict.fromkeys(("squeeze", "flatten"), DataQueries._same_rows),
    "unbind": DataQueries._iterate,
}
"""Function name -> answer; the answer is `NotImplemented` if the call does not query data."""


def _is_list(index: Any) -> bool:
    return type(index) is list and bool(index) and all(type(n) is int for n in index)


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and not index.dim())


def _has_stand_in(value: Any) -> bool:
    """Return whether arguments contain a stand-in. This runs for every function call."""
    for part in value.values() if isinstance(value, dict) else value:
        if type(part) in (DataNumber, DataList):
            return True
        if isinstance(part, (tuple, list, dict)) and _has_stand_in(part):
            return True
    return False


def _refuse_joined(given: Any, made: Any) -> None:
    """Refuse results with a length that is neither data-dependent nor a length of an operand."""
    sizes = {n for leaf in tree_leaves(given) if isinstance(leaf, Tensor) for n in leaf.size()}
    if not has_rows(sizes) or not isinstance(made, Tensor):
        return
    if any(n > 1 and not has_rows([n]) and n not in sizes for n in made.size()):
        raise NeedsData("it joins rows that data selects, or takes some of them")
