"""Numbers that only data has (`x.tolist()`, `x.max().item()`), while there is no data.

Model code gets a stand-in for such a number, and may do two things with it: cut a tensor into so
many rows (`x.split(counts)`: some sizes are made up, and that dim is never split over ranks), and
ask it a question that it goes on from in one way only, because the other way raises (an assert).
What is read must be whole, so that all ranks read the same. Anything else is `Unknown`: then the
module depends on data as a whole.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.tracing.opaque import Opaque, Unknown


class Number:
    """A number that only data has."""

    def __init__(self, questions: Questions, kind: type) -> None:
        self.questions, self.kind = questions, kind

    def _compared(self, _: Any) -> Truth:
        return Truth(self.questions)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    def __bool__(self) -> bool:
        return self.questions.answer()

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

    def __bool__(self) -> bool:
        return self.questions.answer()

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
    """

    def __init__(
        self,
        opaque: Opaque,
        read: Callable[[Tensor], None] = lambda x: None,
        cut: Callable[[Tensor, int], None] = lambda x, dim: None,
    ) -> None:
        self.opaque, self.note_read, self.cut = opaque, read, cut

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
        frame: Any = sys._getframe(1)
        while frame is not None and _is_plumbing(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        found = only_way(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
        if found is None:
            raise Unknown("it branches on data")
        return found


class Asked(TorchFunctionMode):
    """Within, reading a number off a tensor without data gives a `Number`."""

    def __init__(self, questions: Questions) -> None:
        super().__init__()
        self.questions = questions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Numbers read, truths asked, tensors cut by numbers; all other functions as they are."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "__bool__") and isinstance(args[0], Tensor):
            self.questions.read(args[0])
            if name == "__bool__":
                return self.questions.answer()
            kind = float if args[0].is_floating_point() else int
            return self._numbers(tuple(args[0].shape) if name == "tolist" else (), kind)
        if not any(type(leaf) is Number for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if name in ("split", "split_with_sizes"):
            return self._split(func, *args, **kwargs)
        raise Unknown(f"{name} is given a number that only data has")

    def _numbers(self, shape: tuple[int, ...], kind: type) -> Any:
        if not shape:
            return Number(self.questions, kind)
        return [self._numbers(shape[1:], kind) for _ in range(shape[0])]

    def _split(self, func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Into parts of made-up sizes, as equal as can be."""
        if not isinstance(sizes, (list, tuple)):
            raise Unknown("the number of parts depends on data")
        known = sum(n for n in sizes if type(n) is not Number)
        count = sum(type(n) is Number for n in sizes)
        rest = int(x.shape[dim]) - int(known)
        if rest < 0:
            raise Unknown("parts are larger than the whole")
        made = iter(rest // count + (i < rest % count) for i in range(count))
        parts = func(x, [next(made) if type(n) is Number else n for n in sizes], dim)
        for part in parts:
            self.questions.cut(part, dim % x.dim())
        return parts


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
        test = node.test
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passes = test.operand, not passes
        if _is_one_question(test):
            out.append((test.lineno, test.end_lineno or test.lineno, passes))
    return out


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
