"""What model code asks of tensors while there is no data: `ANSWERS` has every function that asks.

A tensor of which the value is known without data (`known_values.py`) is answered with that. Else:

| asked | answered | what follows |
|---|---|---|
| `x.item()`, `x.tolist()` | a stand-in for a number | `x` is replicated: all ranks read the same |
| whether that, or `x`, is true | what does not raise | where only one does not: nothing |
| the same, where it skips code | what runs that code | it is a region that may not run |
| the same, where it goes on either way | both, in two runs | a plan must hold for both |
| `nonzero`, `where(mask)`, `x[mask]` | so many rows as nothing else has | that dim is never split |
| how many those are | a stand-in, or a number to skip by | as whether it is true |
| `x.split(counts)` | parts of made-up sizes | that dim is never split |
| a loop over selected rows | a pass for each unlike the others | it is a region that may not run |
| `x.requires_grad` | both, in two runs | a plan must hold for both |

All else raises `NeedsData`: then the module stands for itself, and is replicated.
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
from torch.utils._pytree import tree_leaves
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
from shardwright.planner.trace.data_queries.known_values import KnownValues, on_data
from shardwright.planner.trace.data_queries.model_code import (
    answer_that_goes_on,
    may_be_caught,
    model_frame,
)
from shardwright.planner.trace.data_queries.stand_ins import (
    COMPARISONS,
    DataList,
    DataNumber,
    RowNumber,
    RowUses,
)
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.queries.harmless import given_back, harmless
from shardwright.planner.trace.record.arguments import mapped
from shardwright.planner.trace.record.record import Record

REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""What tells whether a tensor wants a gradient: code may do something else where it does."""

JOINING = set("cat concat concatenate hstack vstack pad narrow unfold diff __getitem__".split())
"""What makes tensors of other lengths out of the lengths of others."""

SHAPES = ("__get__", "size", "dim", "numel", "__len__")
"""What tells nothing of a number."""


class DataQueries(TorchFunctionMode):
    """Within, what code asks of tensors that have no data is answered.

    Args:
        opaque: Says whether there are stand-ins for numbers, and is told if one was given.
        values: Of tensors, where they have one without data.
        record: Is told of what is read and selected, and has the calls that were made so far.
        hooked: Called with each tensor whose gradient a hook sees.
    """

    def __init__(
        self,
        opaque: Opaque,
        values: KnownValues,
        record: Record | None = None,
        hooked: Callable[[Tensor], None] = lambda x: None,
    ) -> None:
        super().__init__()
        self.opaque, self.values, self.hooked = opaque, values, hooked
        self.record = record or Record([])
        self.regions = Regions(lambda: len(self.record.calls))
        self.selects = False
        """Whether any tensor is as long as data says."""
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        """By id, rows of indices that a mask of one dim selects, and the mask."""
        self.checked: dict[int, Tensor] = {}
        """By id, what a check of torch's raises at if it is not true."""
        self.loops: list[Generator[Any]] = []
        self.rows: dict[int, tuple[Tensor, RowUses]] = {}
        """By id, the number of a row that a pass of a loop is for, as a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What `ANSWERS` has for a function; all others as they are, with no stand-in in them."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and not self.selects and func != REQUIRES_GRAD:
            return func(*args)
        if self.regions.passes and (uses := self._row_in((args, kwargs))) is not None:
            found = self._on_row(uses, name, func, args)
            if found is not NotImplemented:
                return found
            args, kwargs = (mapped(lambda row: row.value, g, RowNumber) for g in (args, kwargs))
        if name in ANSWERS and args:
            found = ANSWERS[name](self, func, args, kwargs)
            if found is not NotImplemented:
                return found
        if _has_stand_in(args) or (kwargs and _has_stand_in(kwargs)):
            if name in ("split", "split_with_sizes"):
                return self._split(func, *args, **kwargs)
            raise NeedsData(f"{name} is given a number that only data has")
        out = func(*args, **kwargs)
        if self.selects and name in JOINING:
            _refuse_joined((args, kwargs), out)
        return out

    def __exit__(self, *error: Any) -> None:
        """Leave loops that code was in when it failed."""
        for loop in self.loops:
            loop.close()
        super().__exit__(*error)

    def value(self, x: Tensor) -> Tensor | None:
        """The value that a tensor has without data, if it does."""
        return self.values.value(inner(x))

    def read(self, x: Tensor) -> None:
        """Note that a tensor is read.

        Raises:
            NeedsData: nothing is to be read.
        """
        if not self.opaque.stand_ins:
            raise NeedsData("it reads numbers off data")
        self.opaque.stood_in = True
        self.record.read.append(inner(x))

    def answer(self) -> bool:
        """The answer to what code asks now, with which it goes on.

        Raises:
            NeedsData: it goes on either way.
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
                raise BranchesOnData(traced_call)
        return found

    # --- numbers

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`item`, `tolist` and `__bool__`."""
        (x,) = args
        if known(x):
            return func(x)
        if (value := self.value(x)) is not None:
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
        """What checks of torch's ask, which raise where it is not so."""
        if (frame := model_frame()) is None or model_frame(calls_itself=True) is not None:
            return NotImplemented
        if may_be_caught(frame.f_code.co_filename, frame.f_lineno):
            return NotImplemented
        out = func(*args)
        self.checked[id(out)] = out
        return out

    def _text(self, func: Any, args: Any, kwargs: Any) -> Any:
        return format(args[0].item(), *args[1:]) if known(args[0]) else NotImplemented

    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`requires_grad`, and `shape`."""
        if func != REQUIRES_GRAD:
            is_shape = getattr(func, "__self__", None) is torch.Tensor.shape
            return self._length(func, args, kwargs) if is_shape else NotImplemented
        frame = model_frame(calls_itself=True)
        if frame is None or harmless(frame):
            return NotImplemented
        if given_back(frame.f_code.co_filename, frame.f_lineno):
            return NotImplemented
        found = branch_paths.answer_for_all("requires_grad")
        return NotImplemented if found is None else found

    def _hook(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.hooked(args[0])
        return RemovableHandle(OrderedDict())

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of numbers; on meta torch forgets them at once."""
        if torch.device(kwargs.get("device") or "cpu").type != "meta":
            return NotImplemented
        out, numbers = func(*args, **kwargs), tree_leaves(args[0])
        if all(isinstance(n, (int, float)) and type(n) is not DataNumber for n in numbers):
            with on_data():
                self.values.keep(inner(out), torch.tensor(args[0], dtype=out.dtype))
        return out

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not known(args[0]):
            raise NeedsData("it takes what only data has to numpy")
        return NotImplemented

    def _split(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Into parts of made-up sizes, as equal as can be."""
        if not isinstance(sizes, (list, tuple)):  # but a stand-in
            raise NeedsData("the number of parts depends on data")
        stated = sum(n for n in sizes if type(n) is not DataNumber)
        count = sum(type(n) is DataNumber for n in sizes)
        rest = int(x.shape[dim]) - int(stated)
        if rest < 0:
            raise NeedsData("parts are larger than the whole")
        made = iter(rest // count + (i < rest % count) for i in range(count))
        parts = func(x, [next(made) if type(n) is DataNumber else n for n in sizes], dim)
        self.record.cut.extend((inner(part), dim % x.dim()) for part in parts)
        return parts

    # --- rows that a mask selects

    def _select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`nonzero`, `argwhere`, and `where` of a mask alone: so many rows as data says."""
        if func.__name__ == "where" and (len(args) > 1 or kwargs):
            return NotImplemented
        with suppress(DynamicOutputShapeException):  # it may have a value without data
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
        return DataList(partial(self._passes, mask, RowNumber))

    def _same_rows(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`squeeze` and `flatten` of rows."""
        if id(args[0]) not in self.selected:
            return NotImplemented
        out = func(*args, **kwargs)
        self._note_selected(out, self.selected[id(args[0])][1])
        return out

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a mask selects of a tensor: what its rows of indices select."""
        x, index = args
        parts = index if isinstance(index, tuple) else (index,)
        masks = [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.bool and p.dim()]
        if not masks:
            return NotImplemented
        with suppress(DynamicOutputShapeException):
            return func(x, index)
        if len(masks) > 1:
            raise NeedsData("several masks say how many rows there are")
        has_value = self.value(masks[0]) is not None
        rows = torch.where(masks[0]) if has_value else self._selected(masks[0], by_dim=True)
        return func(x, tuple(i for p in parts for i in (rows if p is masks[0] else (p,))))

    def _length(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The sizes of a tensor, those that only data has among them."""
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
        """`unbind`, which a loop over a tensor calls."""
        x = args[0]
        if id(x) not in self.selected:
            return NotImplemented

        def row(number: int, uses: RowUses) -> Tensor:
            return self._note_row(torch.tensor(number if x.dim() == 1 else [number]), uses)

        return self._passes(self.selected[id(x)][1], row)

    def _passes(self, mask: Tensor, row: Callable[[int, RowUses], Any]) -> Iterator[Any]:
        """The row of each pass of a loop over those that `mask`, of one dim, may select.

        Raises:
            NeedsData: a pass may depend on which others there are.
        """
        if (frame := model_frame()) is None:
            raise NeedsData("it loops over rows that data selects")
        try:
            tensors = tensors_of(frame.f_locals)
            code = loop_over_rows(frame.f_code.co_filename, frame.f_lineno, tensors)
        except Refused as refused:
            raise NeedsData(str(refused)) from refused
        uses = RowUses(int(mask.shape[0]))
        loop = self.regions.loop(mask, frame, code, (row(n, uses) for n in uses.numbers()))
        self.loops.append(loop)
        return loop

    def _note_row(self, row: Tensor, uses: RowUses) -> Tensor:
        self.rows[id(row)] = row, uses
        return row

    def _row_in(self, given: Any) -> RowUses | None:
        """What is noted of the number of a row that is among arguments, if any is."""
        for part in given.values() if isinstance(given, dict) else given:
            if id(part) in self.rows:
                return self.rows[id(part)][1]
            if type(part) is RowNumber:
                return part.uses
            if isinstance(part, (tuple, list, dict)) and (uses := self._row_in(part)) is not None:
                return uses
        return None

    def _on_row(self, uses: RowUses, name: str, func: Any, args: Any) -> Any:
        """A function that is given the number of a row: note what it does with it."""
        x = args[0]
        if id(x) not in self.rows:
            selects = name == "__getitem__" and not known(x) and self.value(x) is None
            if not selects:
                uses.used()
        elif name in ("__getitem__", "squeeze"):
            return self._note_row(func(*args), uses)
        elif name == "item":
            return RowNumber(func(x), uses)
        elif name in COMPARISONS and isinstance(args[1], int):
            uses.compared(int(args[1]))
        elif name not in SHAPES:
            uses.used()
        return NotImplemented


ANSWERS: Mapping[str, Callable[[DataQueries, Any, Any, Any], Any]] = {
    **dict.fromkeys(("item", "tolist", "__bool__"), DataQueries._number),
    "_is_all_true": DataQueries._check,
    "__format__": DataQueries._text,
    "__get__": DataQueries._attribute,
    **dict.fromkeys(("size", "numel", "nelement", "__len__"), DataQueries._length),
    "register_hook": DataQueries._hook,
    "tensor": DataQueries._constant,
    "numpy": DataQueries._numpy,
    **dict.fromkeys(("nonzero", "argwhere", "where"), DataQueries._select),
    "__getitem__": DataQueries._index,
    **dict.fromkeys(("squeeze", "flatten"), DataQueries._same_rows),
    "unbind": DataQueries._iterate,
}
"""What is answered, by the function that asks; `NotImplemented` where it asks nothing of data."""


def _has_stand_in(value: Any) -> bool:
    """Whether there is a stand-in in arguments; every function that is called asks for it."""
    for part in value.values() if isinstance(value, dict) else value:
        if type(part) in (DataNumber, DataList):
            return True
        if isinstance(part, (tuple, list, dict)) and _has_stand_in(part):
            return True
    return False


def _refuse_joined(given: Any, made: Any) -> None:
    """Refuse a length that is neither one that data says nor one that was there before."""
    sizes = {n for leaf in tree_leaves(given) if isinstance(leaf, Tensor) for n in leaf.size()}
    if not has_rows(sizes) or not isinstance(made, Tensor):
        return
    if any(n > 1 and not has_rows([n]) and n not in sizes for n in made.size()):
        raise NeedsData("it joins rows that data selects, or takes some of them")
