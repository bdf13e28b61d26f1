"""Loops that run as often as lengths say: over a range, parts of a tensor, or a repeated list.

A loop that runs once in a trace does not show what a second run does with the results of the
first. Of a range, a plan keeps what a run hands on in the placement in which the run found it. If
that is not enough, or the loop is another one, its number of runs is noted as a comparison of
lengths: a call of another length is traced, or refused.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise, takewhile
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.data_queries.model_code import (
    is_at,
    is_plumbing,
    model_frame,
    module_of,
    parsed,
)
from shardwright.planner.trace.sizes.expressions import Expression, evaluate, reads_of
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt, expression_of
from shardwright.runtime.slots import leaves

JUMPS = {*dis.hasjrel, *dis.hasjabs}
"""Opcodes after which code may go on in several places."""

DECIDING = "__bool__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__".split()
"""Methods of integers that code decides by."""

CONTAINING = (Tensor, tuple, list)
"""Classes of attributes of modules that may hold tensors from run to run."""

PLAIN = (type(None), float, str)
"""Classes of plain values other than integers."""

ADDING = ("append", "extend", "insert", "add")
"""Methods that put something into a list or a set."""


@contextmanager
def ranges_watched(root: nn.Module) -> Iterator[None]:
    """Context manager in which code of `root` uses `_Range` in place of `range`.

    That is code in files with its classes, and in those that they import functions from.
    """
    files = {c.__module__ for m in root.modules() for c in type(m).__mro__}
    used = (x for own in _names_in(files) for x in own.values() if isinstance(x, FunctionType))
    names = _names_in(files | {str(x.__module__) for x in used})
    for own in names:
        own["range"] = _Range
    try:
        yield
    finally:
        for own in names:
            own.pop("range", None)


def _names_in(files: Iterable[str]) -> list[dict[str, Any]]:
    ours = (f for f in sorted(files) if f in sys.modules and not is_plumbing(f))
    return [own for own in (vars(sys.modules[f]) for f in ours) if "range" not in own]


class Runs(NamedTuple):
    """How often a loop in the code of a frame runs: as often as `size` fits in `span`, rounded up.

    `span` and `size` are expressions.
    """

    provenance: Provenance
    frame: Any
    span: Expression
    size: Expression

    def note(self, number: int, shown: bool = False) -> None:
        """Note that the loop runs so often, and whether its only run shows what more would do."""
        provenance, code = self.provenance, (self.frame, self.span, self.size)
        provenance.tests.note_runs(*code, number, provenance.innermost, shown)


def note_parts(provenance: Provenance, span: int, size: int, number: int) -> None:
    """Note that code may go through so many parts of a tensor."""
    if (frame := model_frame()) is not None:
        Runs(provenance, frame, expression_of(span), expression_of(size)).note(number)


class _OfRange(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (range, _Watched))

    def __call__(cls, *args: Any) -> Any:
        made, frame = range(*args), sys._getframe(1)
        lengths = [x for x in args if isinstance(x, SourcedInt) and reads_of(x.expression)]
        if not lengths:
            return made
        first, last, step = {1: (0, *args, 1), 2: (*args, 1), 3: args}[len(args)]
        low, high, size = map(expression_of, (first, last, step))
        if made.step < 0:
            low, high, size = high, low, ("-", ("constant", 0), size)
        span: Expression = ("-", high, low)
        runs = Runs(lengths[0].provenance, frame, span, size)
        runs.note(len(made), shown=len(made) == 1)
        least = evaluate(span, {}, dict.fromkeys(reads_of(span), 1))
        return _Watched(made, runs) if len(made) == 1 or (made and least <= 0) else made


class _Range(metaclass=_OfRange):
    """It makes ranges, and watches those that have one number, or may have none, by lengths."""


class _Watched:
    """A range that may have more numbers than one, or none, because of lengths."""

    def __init__(self, numbers: range, runs: Runs) -> None:
        self.numbers, self.runs = numbers, runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.numbers, name)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.numbers[index]

    def __reversed__(self) -> Iterator[int]:
        return iter(_Watched(self.numbers[::-1], self.runs))

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers, and note what the loop that goes through them hands on."""
        frame: Any = model_frame()
        before, once, more = _held(frame), len(self.numbers) == 1, True
        try:
            yield from [_Number.of(self.numbers[0], self.runs)] if once else self.numbers
            after = _held(frame)
            alike = before.tensors.keys() == after.tensors.keys() and before.plain == after.plain
            more = not alike or _feeds_loops(frame.f_code, frame.f_lineno, frame.f_lasti)
            pairs = ((x, after.tensors.get(slot, x)) for slot, x in before.tensors.items())
            self.runs.provenance.handed_on.extend((a, b) for a, b in pairs if a is not b)
        finally:  # at a `break`, too
            if once and more:
                self.runs.note(1)


class _Number(int):
    """The only number of a range. Code that decides by it may do something else for others."""

    runs: Runs
    __hash__ = int.__hash__

    @classmethod
    def of(cls, number: int, runs: Runs) -> _Number:
        """Return the number."""
        made = cls(number)
        made.runs = runs
        return made


def _decide(method: str) -> Any:
    def apply(self: _Number, *others: Any) -> Any:
        if not is_plumbing(module_of(sys._getframe(1))):
            self.runs.note(1)
        return getattr(int, method)(self, *others)

    return apply


for _name in DECIDING:
    setattr(_Number, _name, _decide(_name))


class _Held(NamedTuple):
    """What a loop may find in variables and in attributes of modules.

    These are floating tensors, also in containers, by their slots, and plain values by their names.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def _held(frame: Any) -> _Held:
    """Return what the loop at which the code of a frame is may find."""
    held = frame.f_locals
    names = sorted(_read_first(frame.f_code, frame.f_lasti) & held.keys())
    own = {name: held[name] for name in names}
    plain = {name: x for name, x in own.items() if type(x) in PLAIN}
    plain |= {name: expression_of(x) for name, x in own.items() if isinstance(x, int)}
    owners = [x for x in held.values() if isinstance(x, nn.Module)]
    parts = {id(part): part for owner in owners for part in owner.modules()}
    kept = {
        n: {k: x for k, x in vars(part).items() if isinstance(x, CONTAINING)}
        for n, part in parts.items()
    }
    found = ((slot, x) for slot, x in leaves({"": own, **kept}) if isinstance(x, Tensor))
    return _Held({slot: inner(x) for slot, x in found if x.is_floating_point()}, plain)


@lru_cache(maxsize=256)
def _read_first(code: CodeType, at: int) -> frozenset[str]:
    """Return the variables that a loop may read before it sets them, by the place of its `for`.

    Lists to which it only appends do not count. Functions that it calls may read variables, too.
    """
    steps = [*dis.get_instructions(code)]
    loop = next((s for s in steps if s.offset == at and s.opname == "FOR_ITER"), None)
    shared = (*code.co_cellvars, *code.co_freevars)
    if loop is None:  # `next(iterator)`
        return frozenset((*code.co_varnames, *shared))
    body = [s for s in steps if at < s.offset < loop.argval]
    first: dict[str, bool] = {}
    for step in takewhile(lambda s: s.opcode not in JUMPS, body):
        for name in _named(step):
            first.setdefault(name, "LOAD" in step.opname)
    loads = (
        (name, after) for s, after in pairwise(body) if "LOAD" in s.opname for name in _named(s)
    )
    read = {name for name, after in loads if after.argval != "append"}
    return frozenset((*shared, *(name for name in read if first.get(name, True))))


def _named(step: dis.Instruction) -> tuple[Any, ...]:
    """Return the names that an instruction reads or sets: newer versions of Python join two."""
    if not ("LOAD" in step.opname or "STORE" in step.opname):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


@lru_cache(maxsize=256)
def _feeds_loops(code: CodeType, line: int, at: int) -> bool:
    """Return whether code at a place makes something of a range that loops go through.

    Loops of the same function count, and all loops if it is yielded, or returned at once. Code that
    is neither a loop nor a comprehension (`list(numbers)`) is taken for such code.
    """
    if code.co_code[at] != dis.opmap["FOR_ITER"]:
        return True
    functions = [n for n in ast.walk(parsed(code.co_filename)) if isinstance(n, ast.FunctionDef)]
    nodes = [n for function in functions if is_at(function, line) for n in ast.walk(function)]
    made: list[ast.AST] = []
    for node in (n for n in nodes if isinstance(n, ast.stmt) and is_at(n, line)):
        inside = [*ast.walk(node)]
        match node:
            case ast.Assign(targets=targets):
                made += targets
            case ast.Return(value=ast.ListComp() | ast.GeneratorExp()):
                return True
            case ast.For(iter=ast.ListComp() | ast.GeneratorExp() as over) if is_at(over, line):
                return True
            case ast.For() if any(isinstance(n, ast.Yield) for n in inside):
                return True
            case ast.For():
                calls = [n.func for n in inside if isinstance(n, ast.Call)]
                adds = [f for f in calls if isinstance(f, ast.Attribute) and f.attr in ADDING]
                made += [f.value for f in adds]
    names = {n.id for one in made for n in ast.walk(one) if isinstance(n, ast.Name)}
    through = [n.iter for n in nodes if isinstance(n, (ast.For, ast.comprehension))]
    return any(isinstance(n, ast.Name) and n.id in names for x in through for n in ast.walk(x))
