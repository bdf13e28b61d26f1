"""Log the calls of model code, to compare a sharded model with the unsharded model call by call.

Shapes do not show that a number has changed. `x / x.shape[-1]` divides by less on a shard. A loop
over `range(self.num_heads)`, a branch on it, or `len(x[0])` are similar. The calls that a module's
own code makes are therefore logged in the unsharded model and in the model of a rank, and compared.
Calls that only move elements are left out, because their shapes are compared anyway, and so are the
sizes that other calls take. Positions and counts are compared if both operands have the same shape:
the same elements must be taken. Counts of repeats are compared with those that the plan implies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.planner.trace.data_queries.model_code import frames, module_of
from shardwright.planner.trace.sizes.size_functions import (
    AT_PLACES,
    COUNTING,
    LITERAL,
    PARTS,
    REPEATING,
    SIZED,
    SPLIT,
    counts_of,
    numbers_of,
)
from shardwright.planner.trace.trial import kept_results
from shardwright.planner.trace.trial.origins import (
    UNKNOWN,
    Origin,
    Origins,
    agree,
    keep_origin,
    origins_of,
    set_origin,
)

MOVING = {*LITERAL, *SPLIT} | set(
    """
__get__ __set__ __getitem__ __len__ chunk clone contiguous detach dim flatten ndimension
nelement numel permute repeat squeeze size select narrow stride storage_offset transpose t
tensor_split type_as unbind unsqueeze repeat_interleave swapaxes movedim is_floating_point
expand_as view_as reshape_as is_complex is_contiguous data_ptr element_size to float double half
bfloat16 embedding __hash__ __repr__ requires_grad_
""".split()
)
"""Functions that compute nothing. (The runtime handles lookups of embeddings.)"""


@dataclass(frozen=True)
class Call:
    """A function, its plain number arguments, and the origins of its tensors."""

    function: str
    numbers: tuple[Any, ...]
    origins: Origins = field(default=(), compare=False)

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        if self.function.startswith(PIECES):
            return f"{self.function.removeprefix(PIECES)}() into {numbers} pieces"
        return f"{self.function.removeprefix(AT)}({numbers})"


Calls = dict[str, list[Call]]
"""Module -> the calls of its own code, in order."""

HAND_ON = (
    "forward", "wrapper", "__torch_function__", "compute", "call_with_originals", "call_directly",
    "run_with_full_tensors",
)  # fmt: skip
"""Functions of the runtime that wrap and call other functions."""

STAND_INS = (
    "shardwright.planner.trace.torch_features.flex_attention",
    "torch._subclasses.fake_tensor",
)
"""Python modules whose functions run in place of torch's: what they call, model code does not."""

RUNS = "runs"
"""Log entry for a call of another module. These calls are not compared."""

PASSES = "passes"
"""Log entry for a call of this module: the origins of what it takes and returns."""

AT = "at places: "
"""Prefix of entries that log positions and the shape of the operand."""

CUTTING = SPLIT | PARTS | {"hsplit", "vsplit", "dsplit"}
PIECES = "pieces: "
"""Functions that cut a tensor, and the prefix of entries that log into how many pieces: code may
take them in another order, and join them again."""

REPEATED = {AT + name for name in REPEATING}


Numbers = tuple[Any, ...]

Repeats = Mapping[tuple[str, Numbers], Container[Numbers]]
"""(module, entry of `REPEATED` in the unsharded model) -> entries allowed on a rank."""


class Entered(list[str]):
    """Paths of the modules that currently run, the innermost last."""

    calls: Calls | None = None
    """The log for the calls of these modules."""

    def enter(self, name: str) -> None:
        """Note that module `name` begins to run."""
        if self.calls is not None and self:
            self.calls.setdefault(self[-1], []).append(Call(RUNS, (name,)))
        self.append(name)

    def leave(self, passed: Origins) -> None:
        """Note that the innermost module has run, and what it was given and returns."""
        name = self.pop()
        if self.calls is not None:
            self.calls.setdefault(name, []).append(Call(PASSES, (), passed))


class Notes(TorchFunctionMode):
    """Mode that logs the calls of every module; `entered` has the modules that currently run."""

    def __init__(self, entered: Entered) -> None:
        super().__init__()
        self.entered, self.found = entered, Calls()
        self._calls = Counter[str]()
        entered.calls = self.found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Log the call if it comes from model code."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        places = (name in AT_PLACES or name in REPEATING) and args and isinstance(args[0], Tensor)
        counts = places or name in CUTTING or name not in MOVING
        logs = self.entered and counts and not _from_runtime()
        if logs:
            self._log(name, places, args, kwargs)
        made = kept_results.call(func, args, kwargs)
        if logs and name in CUTTING:
            self.found[self.entered[-1]].append(Call(PIECES + name, (len(made),)))
        if name in MOVING and args:
            keep_origin(made, args[1] if name == "embedding" and len(args) > 1 else args[0])
        elif logs:
            self._calls[self.entered[-1]] += 1
            number = self._calls[self.entered[-1]]
            set_origin(_changed(name, args, made), Origin({f"{self.entered[-1]}: {name} {number}"}))
        else:
            set_origin(_changed(name, args, made), UNKNOWN)
        return made

    def _log(self, name: str, places: bool, args: Any, kwargs: Any) -> None:
        """Log a call of the module that runs, before it is made."""
        found = self.found.setdefault(self.entered[-1], [])
        if places:
            self._note_places(name, args, kwargs)
        if name not in MOVING:
            kinds = float if name in COUNTING or name in SIZED else (int, float)
            numbers = tuple(_numbers([*args, *kwargs.values()], kinds))
            numbers += tuple(_numbers(numbers_of(name, args, kwargs), int))
            found.append(Call(name, numbers, origins_of((args, kwargs))))

    def _note_places(self, name: str, args: Any, kwargs: Any) -> None:
        """Log which elements of a tensor are taken."""
        with torch._C.DisableTorchFunction():
            shape = tuple(args[0].shape)
        if name in REPEATING:
            numbers = repeated(shape, counts_of(args, kwargs))
        else:
            numbers = (shape, *_numbers([*args[1:], *kwargs.values()], int))
            if name == "repeat_interleave" and len(numbers) > 2 and shape[numbers[2]] == 1:
                numbers = (shape, numbers[2])  # the count is a size of the result
        self.found.setdefault(self.entered[-1], []).append(Call(AT + name, numbers))


def _changed(name: str, args: Any, made: Any) -> Any:
    """Return what a function has made or changed in place; None if it returns what it is given."""
    if name == "__setitem__":
        return args[0]
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return None if not in_place and any(made is x for x in args) else made


def repeated(shape: Sequence[int], counts: Sequence[int]) -> Numbers:
    """Return the log entry for a tensor of this `shape` whose last dims are repeated by `counts`.

    Dims of length 1 are left out, because the count is then a size of the result.
    """
    pairs = zip(reversed(shape), reversed(counts), strict=False)
    return tuple(shape), *[count for length, count in pairs if length > 1][::-1]


def _numbers(values: Any, kind: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _numbers(value, kind)
        elif isinstance(value, slice):
            yield from _numbers((value.start, value.stop, value.step), kind)
        elif isinstance(value, kind):
            yield value


def _from_runtime() -> bool:
    """Return whether the runtime itself makes the call: a collective, a shard of a mask.

    Or a function that stands in for one of torch's.
    """
    for frame in frames():
        module = module_of(frame)
        if module in STAND_INS:
            return True
        if module.startswith("shardwright.runtime"):
            if frame.f_code.co_name not in HAND_ON or module.endswith(".vocab"):
                return True
        elif not module.startswith(("torch", "shardwright.")):
            return False
    return False


def difference(
    whole: Mapping[str, list[Call]],
    local: Mapping[str, list[Call]],
    repeats: Repeats,
) -> tuple[str, str] | None:
    """Return the first module whose code computes something else on a rank, and a description.

    Returns None if there is none. Counts of repeats must be among `repeats`. A repeat that is not
    in `repeats` is not checked, because its result is unused.
    """
    for module, noted in whole.items():
        calls, mine = _computed(noted), _computed(local.get(module, []))
        for a, b in zip(calls, mine, strict=False):
            if a != b:
                return module, f"its code calls {b} on a rank, but {a} if unsharded"
            if not agree(a.origins, b.origins):
                return module, f"its code calls {a.function} with other tensors on a rank"
        taken, here = _at_places(noted), _at_places(local.get(module, []))
        for a, b in zip(taken, here, strict=True) if len(taken) == len(here) else ():
            if a.function in REPEATED:
                right = b.numbers in repeats.get((module, a.numbers), [b.numbers])
            else:
                right = a == b or a.numbers[0] != b.numbers[0]
            if a.function == b.function and not right:
                return module, f"its code calls {b} on a rank, but {a} if unsharded"
        passed, here = _passed(noted), _passed(local.get(module, []))
        for a, b in zip(passed, here, strict=True) if len(passed) == len(here) else ():
            if not agree(a.origins, b.origins):
                return module, "it takes or returns other tensors on a rank"
        if len(calls) != len(mine):
            return module, f"its code makes {len(mine)} calls on a rank, {len(calls)} if unsharded"
    return None


def _computed(calls: Sequence[Call]) -> list[Call]:
    left_out = {RUNS, PASSES}
    return [c for c in calls if c.function not in left_out and not c.function.startswith(AT)]


def _passed(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.function == PASSES]


def _at_places(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.function.startswith(AT)]
