"""Marker ops where tensors enter and leave modules, inserted around the forwards of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._C._functorch import (
    peek_interpreter_stack,  # pyright: ignore[reportMissingImports]
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardwright.planner.graph.graph import KEEPS
from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.queries.flags import Noted
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.state.attribute_reads import alike, found_in, same
from shardwright.runtime.modules.recomputation import FLAG, is_cache
from shardwright.runtime.slots import give_back, map_slots, names_of, rebuilt, tensors

if hasattr(torch.ops.shardwright, "boundary"):  # torch keeps ops as long as the process lives
    raise ImportError(
        "Shardwright was taken out of sys.modules and is imported again, which torch does not "
        "allow for its ops: restart Python"
    )

torch.library.define("shardwright::boundary", "(Tensor x, str tag) -> Tensor")
BOUNDARY = torch.ops.shardwright.boundary.default
"""An identity op that exists only in traces; `read_tag` reads its tag."""

torch.library.define("shardwright::passes", "(Tensor x, str tag) -> ()")
PASSES = torch.ops.shardwright.passes.default
"""Marks a tensor that is not floating; it is never resharded there."""


torch.library.define("shardwright::writes", "(Tensor(a!) outside, Tensor inside, str module) -> ()")
WRITES = torch.ops.shardwright.writes.default
"""Copies an in-place change of a tensor inside a module to the tensor outside of it."""


def read_tag(tag: str) -> tuple[str, str, str]:
    """Return the module, side and slot of a marker."""
    module, side, slot = tag.split("|", 2)
    return module, side, slot


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters of a bound `forward`."""
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


NUMBERS = (int, float, str)
"""What code may tell other code of the values that it has read."""


class CallStack(list[str]):
    """The paths of the modules that currently run, the innermost last.

    Attributes:
        callers: Module -> the modules whose code calls it.
        reads: Modules whose code may do something else for other example inputs: it reads values
            computed from theirs, or gets numbers from a module whose code does.
        changing: Modules that change their arguments, among those that may be computed again in the
            backward pass; in eval mode and in training mode.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        super().__init__(paths)
        self.callers: dict[str, set[str]] = {}
        self.reads: set[str] = set()
        self.changing: tuple[set[str], set[str]] = set(), set()

    @property
    def innermost(self) -> str:
        """Return the module that currently runs."""
        return self[-1] if self else ""

    def read(self) -> None:
        """Note that the innermost module reads values computed from example inputs."""
        self.reads.add(self.innermost)

    def enter(self, path: str) -> None:
        """Note that a module begins to run."""
        self.callers.setdefault(path, set()).add(self.innermost)
        self.append(path)

    def leave(self, output: Any) -> None:
        """Note that the innermost module has returned `output`.

        It may tell its caller what it has read.
        """
        path, told = self.pop(), (x for x in tree_leaves(output) if isinstance(x, NUMBERS))
        if path in self.reads and any(True for _ in told):
            self.read()

    def given_numbers(self) -> set[str]:
        """Return the modules that may be given numbers that depend on data."""
        return {path for path, callers in self.callers.items() if callers & self.reads}


@contextmanager
def marked(root: nn.Module) -> Iterator[tuple[CallStack, dict[str, Noted]]]:
    """Context manager in which each module of `root` marks the tensors that it takes and returns.

    Yields the paths of the modules that currently run, and the noted flags of each module.
    """
    entered = CallStack()
    noted: dict[str, Noted] = {}
    with ExitStack() as undo:
        for name, module in root.named_modules():
            noted[name] = Noted(module.forward)
            marking = partial(_marking, name, module, entered, noted[name])
            undo.callback(put_around(module, marking))
        yield entered, noted


def _marking(
    name: str, module: nn.Module, entered: CallStack, noted: Noted, forward: Forward
) -> Forward:
    """Return `forward` of the module `name` with markers."""
    names = argument_names(forward)

    def mark(x: torch.Tensor, tag: str) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # not a call of model code
            if x.is_floating_point():
                _check_plain(x)
                # A constant, as `torch.tensor(LIST)` makes it, comes from no op of this run.
                return BOUNDARY(x, tag) if isinstance(x, FunctionalTensor) else x
            PASSES(x, tag)
            return x

    def mark_attributes(before: dict[str, torch.Tensor]) -> None:
        """Mark the tensors that `module` has in attributes and did not have `before`."""
        for slot, value in _tensors_of(module).items():
            if value is not before.get(slot):
                vars(module)[slot] = mark(value, f"{name}|{KEEPS}|{slot}")

    def contents(at: list[str], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return what is in the arguments, but caches, of a module that may be computed again."""
        if not hasattr(type(module), FLAG):
            return None
        named = {**dict(zip(at, args, strict=True)), **kwargs}
        return found_in({name: x for name, x in named.items() if not is_cache(name, x)})

    @wraps(forward)
    def marked_forward(*args: Any, **kwargs: Any) -> Any:
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise Unproven(
                "it calls modules within a transform of torch.func, where ranks cannot exchange "
                "tensors: take gradients by backward() or torch.autograd.grad, and call modules on "
                "batches, or put the code into a module within, which then stays replicated"
            )

        def enter(x: torch.Tensor, slot: str) -> torch.Tensor:
            return mark(x, f"{name}|in|{slot}")

        def leave(x: torch.Tensor, slot: str) -> torch.Tensor:
            return mark(x, f"{name}|out|{slot}")

        at = names_of(args, names)
        given = {**dict(zip(at, args, strict=True)), **kwargs}
        noted.call(given)
        taken = [map_slots(a, s, enter) for a, s in zip(args, at, strict=True)]
        more = {k: map_slots(v, k, enter) for k, v in kwargs.items()}
        entered.enter(name)
        kept = _tensors_of(module)
        before = contents(at, taken, more)
        both = zip(tensors((args, kwargs)), tensors((taken, more)), strict=True)
        taken_in = [(outside, inside, _value(inside)) for (_, outside), (_, inside) in both]
        inside_of = (*taken, *more.values())
        containers = rebuilt((*args, *kwargs.values()), inside_of) if entered[:-1] else []
        output = forward(*taken, **more)
        entered.leave(output)  # after a failure `entered` must show the place
        give_back(containers)
        mark_attributes(kept)
        if not alike(before, contents(at, taken, more), same):
            entered.changing[module.training].add(name)
        for outside, inside, was in taken_in:
            if inside is outside:
                continue
            _check_plain(inside)
            if _value(inside) is not was:
                WRITES(outside, inside, name)
        return map_slots(output, "", leave)

    return marked_forward


def _check_plain(x: torch.Tensor) -> None:
    """Check that code has set no attributes of a tensor that enters or leaves a module.

    Raises:
        Unproven: it has. A tensor that is redistributed there becomes another object without them.
    """
    known = {*FunctionalTensor.__annotations__, "_is_param"}
    if isinstance(x, FunctionalTensor) and (more := [n for n in vars(x) if n not in known]):
        raise Unproven(
            f"it sets the attribute '{more[0]}' of a tensor that enters or leaves a module, and "
            "the tensor on the other side may be another one: give the value as an argument or "
            "output of its own"
        )


def _value(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return inner(x)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating tensors that are plain attributes of a module."""
    found = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor)}
    with torch._C.DisableTorchFunction():
        return {name: value for name, value in found.items() if value.is_floating_point()}
