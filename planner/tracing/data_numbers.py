"""Numbers that only data has (`x.tolist()`, `x.max().item()`), while there is no data.

Model code gets a stand-in for such a number, and may do two things with it: cut a tensor into so
many rows (`x.split(counts)`: some sizes are made up, and that dim is never split over ranks), and
ask it a question that it goes on from in one way only, because the other way raises (an assert).
It may also select so many rows (`mask.nonzero()`, `x[mask]`), and make a pass of a loop for each of
them (see `data_loops.py`). What is read must be whole, so that all ranks read the same. Anything
else is `Unknown`: then the module depends on data as a whole.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.pricing.cost import TRACE_ROWS
from shardwright.planner.tracing.data_loops import Loop, inner, known
from shardwright.planner.tracing.known import on_data
from shardwright.planner.tracing.loop_code import Found, Refused, ends_pass, independent
from shardwright.planner.tracing.loop_rows import rows_to_try
from shardwright.planner.tracing.opaque import Opaque, Undecided, Unknown
from shardwright.planner.tracing.ways import answer

WRAPPERS = ("torch.overrides", "torch._tensor", __name__)
"""Modules through which functions of tensors are called."""


class Number:
    """A number that only data has."""

    def __init__(self, questions: Questions, kind: type) -> None:
        self.truth, self.kind = Truth(questions), kind

    def _compared(self, _: Any) -> Truth:
        return Truth(self.truth.questions)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    def __bool__(self) -> bool:
        return bool(self.truth)

    __int__ = __index__ = __float__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _used
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _used
    __pow__ = __rpow__ = __abs__ = __round__ = __str__ = __format__ = _used  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore  # code that asks what it is goes on as with the real one
        return self.kind


class Truth:
    """The answer to a question on such a number."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        self.found: bool | None = None

    def __bool__(self) -> bool:
        if self.found is None:
            self.found = self.questions.answer()
        return self.found

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    __eq__ = __ne__ = __hash__ = __int__ = __index__ = __float__ = _used  # type: ignore[assignment]
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __invert__ = _used
    __add__ = __radd__ = __mul__ = __rmul__ = _used


def _refuse() -> NoReturn:
    raise Unknown("it computes with a number that only data has")


class Questions:
    """What model code asks of data, and the answers.

    Args:
        opaque: Says whether there are any, and is told if one was given.
        read: Called with each tensor that is read.
        cut: Called with each tensor that is made of as many rows as data says, and that dim.
        now: How many calls were made so far.
        value: The value of a tensor, where it has one without data.
    """

    def __init__(
        self,
        opaque: Opaque,
        read: Callable[[Tensor], None] = lambda x: None,
        cut: Callable[[Tensor, int], None] = lambda x, dim: None,
        now: Callable[[], int] = lambda: 0,
        value: Callable[[Tensor], Tensor | None] = lambda x: None,
    ) -> None:
        self.opaque, self.note_read, self.cut = opaque, read, cut
        self.now, self.value = now, value
        self.loops: list[Loop] = []
        self.running: list[tuple[Any, ast.For]] = []
        """The loops that are in a pass, the innermost last, and the frames of their code."""

    def read(self, x: Tensor) -> None:
        """Note that a tensor is read.

        Raises:
            Unknown: nothing is to be read.
        """
        if not self.opaque.guesses:
            raise Unknown("it reads numbers off data")
        self.opaque.guessed = True
        self.note_read(x)

    def answer(self) -> bool:
        """The truth that the code being run does not raise at.

        Raises:
            Unknown: it goes on either way.
        """
        frame = _model_frame()
        if frame is None:
            raise Unknown("it branches on data")
        found = only_way(frame.f_code.co_filename, frame.f_lineno)
        if found is None and self.running and self.running[-1][0] is frame:
            test = ends_pass(self.running[-1][1], frame.f_lineno)
            found = None if test is None else truth(test, False)
        if found is None and self.running:
            raise Unknown("it branches on data in a pass of a loop over rows")
        if found is None:
            turn, found = answer()
            if found is None:
                raise Undecided(turn)
        return found

    def passes(self, mask: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """Every row of indices that `mask`, of one dim, may select, in a pass of a loop each.

        Raises:
            Unknown: a pass may depend on which others there are.
        """
        frame = _model_frame()
        if frame is None:
            raise Unknown("it loops over rows that data selects")
        tensors = {n for n, v in frame.f_locals.items() if isinstance(v, Tensor)}
        try:
            found = independent(frame.f_code.co_filename, frame.f_lineno, tensors)
        except Refused as refused:
            raise Unknown(str(refused)) from refused
        loop = Loop(inner(mask))
        self.loops.append(loop)
        return self._passes(loop, frame, found, rows)

    def _has_value(self, x: Tensor) -> bool:
        return known(x) or self.value(x) is not None

    def _passes(self, loop: Loop, frame: Any, found: Found, rows: Tensor) -> Iterator[Tensor]:
        count = int(loop.mask.shape[0])
        for i in rows_to_try(found.loop, found.stored, frame.f_locals, count, self._has_value):
            loop.starts.append(self.now())
            self.running.append((frame, found.loop))
            yield torch.tensor(i) if rows.dim() == 1 else torch.tensor([i])
            self.running.pop()
        loop.stop = self.now()


def _model_frame() -> Any:
    """The frame of model code that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_plumbing(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


NUMBERS = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__format__"}
"""What makes a number of a tensor."""


LENGTHS = {"__get__", "size", "numel", "nelement", "__len__"}
"""What tells how long a tensor is; the first is `shape`."""

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
        if name in NUMBERS and known(args[0]):
            return format(args[0].item(), *args[1:]) if name == "__format__" else func(*args)
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
            self.selected[id(out)] = out, self.selected[id(args[0])][1]
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
            kind = float if dtype.is_floating_point else bool if dtype == torch.bool else int
            return self._numbers(tuple(args[0].shape) if name == "tolist" else (), kind)
        if not any(type(leaf) is Number for leaf in tree_leaves((args, kwargs))):
            out = func(*args, **kwargs)
            if self.selects and name in JOINING:
                _refuse_joined((args, kwargs), out)
            return out
        if name in ("split", "split_with_sizes"):
            return self._split(func, *args, **kwargs)
        raise Unknown(f"{name} is given a number that only data has")

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
                self.selected[id(rows)] = rows, x
        return made if name == "where" or as_tuple else made[0]

    def _by_mask(self, func: Any, x: Tensor, index: Any, masks: list[Tensor]) -> Tensor:
        """What a mask selects of `x`: what its rows of indices select."""
        if len(masks) > 1:
            raise Unknown("several masks say how many rows there are")
        rows = self._select("where", masks[0])
        parts = index if isinstance(index, tuple) else (index,)
        return func(x, tuple(i for p in parts for i in (rows if p is masks[0] else (p,))))

    def _lengths(self, name: str, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The sizes of `x`, those that only data has among them."""
        sizes = tuple(x.size())
        if all(n % TRACE_ROWS or not n for n in sizes):
            return func(x, *args, **kwargs)
        if name == "__len__":
            raise Unknown("it takes the number of rows that data selects")
        if name in ("numel", "nelement"):
            return Number(self.questions, int)
        number = Number(self.questions, int)
        found = tuple(n if n % TRACE_ROWS or not n else number for n in sizes)
        dim = kwargs.get("dim", args[0] if args and name == "size" else None)
        return found if dim is None else found[dim]

    def _numbers(self, shape: tuple[int, ...], kind: type) -> Any:
        if not shape:
            return Number(self.questions, kind)
        return [self._numbers(shape[1:], kind) for _ in range(shape[0])]

    def _split(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Into parts of made-up sizes, as equal as can be."""
        if not isinstance(sizes, (list, tuple)):
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


def _masks(index: Any) -> list[Tensor]:
    """The masks in an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return [p for p in parts if isinstance(p, Tensor) and p.dtype == torch.bool and p.dim()]


def _refuse_joined(given: Any, made: Any) -> None:
    """Refuse a length that is neither one that data says nor one that was there before."""
    sizes = {n for leaf in tree_leaves(given) if isinstance(leaf, Tensor) for n in leaf.size()}
    if not any(n and n % TRACE_ROWS == 0 for n in sizes) or not isinstance(made, Tensor):
        return
    if any(n > 1 and n % TRACE_ROWS and n not in sizes for n in made.size()):
        raise Unknown("it joins rows that data selects, or takes some of them")


def _asked_by_model() -> bool:
    """Whether the function that is called now is called by model code itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name != "__torch_function__" and module not in WRAPPERS:
            return not _is_plumbing(module)
        frame = frame.f_back
    return False


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


def _is_plumbing(module: str) -> bool:
    return module.split(".")[0] in ("torch", "shardwright")


@lru_cache(maxsize=256)
def _tests(file: str) -> list[tuple[int, int, bool]]:
    """First and last line of each test that raises when it fails, and the truth that passes it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    caught = {
        id(node)
        for attempt in ast.walk(tree)
        if isinstance(attempt, (ast.Try, ast.With))  # a context may suppress what is raised
        for statement in attempt.body
        for node in ast.walk(statement)
    }
    out = []
    for node in ast.walk(tree):
        if id(node) in caught:
            continue
        if isinstance(node, ast.Assert):
            passes = True
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[0], ast.Raise):
            passes = False
        else:
            continue
        if (found := truth(node.test, passes)) is not None:
            out.append((node.test.lineno, node.test.end_lineno or node.test.lineno, found))
    return out


def truth(test: ast.expr, passes: bool) -> bool | None:
    """The answer to the one question of a test with which it `passes`; None if it has others."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, passes = test.operand, not passes
    return passes if _is_one_question(test) else None


def _is_one_question(test: ast.expr) -> bool:
    """Whether all that a test asks is whether it is true as a whole."""
    inner = (ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.comprehension, ast.Lambda, ast.Await)
    plain = not any(isinstance(node, inner) for node in ast.walk(test))
    one = not isinstance(test, ast.Compare) or len(test.ops) == 1
    member = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.In, ast.NotIn))
    asked = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("bool", "all", "any")
        for node in ast.walk(test)
    )
    return plain and one and not member and not asked


def only_way(file: str, line: int) -> bool | None:
    """The truth of a test at this place with which code goes on; None if it does with either."""
    found = {passes for first, last, passes in _tests(file) if first <= line <= last}
    return found.pop() if len(found) == 1 else None
