"""Which attribute does a size come from? Integers that remember, notes where they become sizes.

Model code mixes sizes read off tensors (right on a local tensor by themselves), sizes from
attributes (`self.num_heads`, `config.hidden_size // n`), which must be replaced by local ones, and
literals, which nothing can replace. While tracing, every int attribute of every module and of its
config, and every size read off a tensor, is an `Origin`: an int whose arithmetic keeps the
expression. A torch function mode sees where one becomes a size of a result. An attribute
that takes part in float arithmetic (`x / self.num_heads`) is pinned: it must keep its value.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.trace.recorder import inner

Expression = tuple[Any, ...]
Fact = tuple[Expression, int, str]
"""Expression, dim and slice bound of a size."""


PINNED: set[tuple[str, str]] = set()
"""Attributes (module, name) used as numbers while the present trace runs."""

READ: list[torch.Tensor] = []
"""The tensors whose sizes were read in it, by their numbers in "read" expressions."""

SIZES: list[tuple[torch.Tensor, Fact]] = []
"""Tensors with sizes that were computed, or bare numbers."""

SOURCES: dict[int, torch.Tensor] = {}
"""Those of READ that some size, or some number, was computed from."""

FIXED: set[tuple[int, int]] = set()
"""Reads (number, dim) used as numbers: the results would change with the size."""

COUNTED: set[tuple[int, int]] = set()
"""Reads (number, dim) that made new tensors."""


class Origin(int):
    """An int that remembers the attributes it was computed from."""

    expression: Expression

    @classmethod
    def make(cls, value: int, expression: Expression) -> Origin:
        """An int of this value with this history."""
        out = cls(value)
        out.expression = expression
        return out


def _expression(value: int) -> Expression:
    return value.expression if isinstance(value, Origin) else ("constant", int(value))


def _keep(symbol: str, method: str, swapped: bool) -> Any:
    def apply(self: Origin, other: Any) -> Any:
        result = getattr(int, method)(self, other)
        if type(other) not in (int, Origin) or result is NotImplemented:
            return result
        left, right = (other, self) if swapped else (self, other)
        return Origin.make(result, (symbol, _expression(left), _expression(right)))

    return apply


for _symbol, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv")):
    setattr(Origin, f"__{_name}__", _keep(_symbol, f"__{_name}__", False))
    setattr(Origin, f"__r{_name}__", _keep(_symbol, f"__r{_name}__", True))


def _pinned(value: Origin) -> None:
    PINNED.update(attributes_of(value.expression))
    FIXED.update(reads_of(value.expression))


def _pin(method: str) -> Any:
    def apply(self: Origin, *others: Any) -> Any:
        _pinned(self)
        return getattr(int, method)(self, *others)

    return apply


for _name in ("__pow__", "__rpow__", "__truediv__", "__rtruediv__", "__float__"):
    setattr(Origin, _name, _pin(_name))
Origin.__neg__ = lambda self: Origin.make(-int(self), ("-", ("constant", 0), self.expression))  # noqa: B010
setattr(Origin, "__reduce__", lambda self: (int, (int(self),)))  # noqa: B010


def evaluate(
    expression: Expression,
    attributes: Mapping[tuple[str, str], int],
    reads: Mapping[tuple[int, int], int] | None = None,
) -> int:
    """The value of `expression` where attributes (module, name) and reads have these values."""
    head, *rest = expression
    if head == "constant":
        return int(rest[0])
    if head == "read":
        return (reads or {}).get((rest[1], rest[2]), int(rest[0]))
    if head == "attribute":
        return attributes.get((rest[0], rest[1]), rest[2])
    left, right = (evaluate(tuple(e), attributes, reads) for e in rest)
    if head == "+":
        return left + right
    if head == "-":
        return left - right
    if head == "*":
        return left * right
    return left // right if right else 0


def attributes_of(expression: Expression) -> set[tuple[str, str]]:
    """The attributes (module, name) in `expression`."""
    return {(leaf[1], leaf[2]) for leaf in _leaves(expression) if leaf[0] == "attribute"}


def reads_of(expression: Expression) -> set[tuple[int, int]]:
    """The reads (number of the tensor, dim) in `expression`."""
    return {(leaf[2], leaf[3]) for leaf in _leaves(expression) if leaf[0] == "read"}


def _leaves(expression: Expression) -> Iterator[Expression]:
    """What `expression` is computed from."""
    if expression[0] in ("constant", "attribute", "read"):
        yield expression
    else:
        for part in expression[1:]:
            yield from _leaves(tuple(part))


SIZED = set(
    """
view reshape expand unflatten new_zeros new_ones new_empty new_full zeros ones full empty
_unsafe_view resize broadcast_to
""".split()
)
LITERAL = {"view", "reshape", "expand", "unflatten", "_unsafe_view", "broadcast_to"}
"""Functions in which a bare number is a size that the result must have on every rank."""
SPLIT = {"split", "split_with_sizes"}
CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
COUNTING = CONVOLUTIONS | set(
    """
arange chunk permute transpose unsqueeze squeeze flatten repeat repeat_interleave narrow pad
layer_norm rms_norm embedding one_hot topk __setitem__ to tile group_norm roll
select sum mean tril triu scaled_dot_product_attention
""".split()
)
"""Functions that take counts and positions, not numbers to compute with."""
CREATING = {"arange", "zeros", "ones", "full", "empty", "eye", "linspace", "rand", "randn"}
"""Functions that make a tensor of nothing but sizes."""


def _plain(value: Any) -> Any:
    if isinstance(value, Origin):
        return int(value)
    if type(value) in (tuple, list):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, torch.Size):
        return torch.Size(int(v) for v in value)
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value


def _has_origin(value: Any) -> bool:
    if isinstance(value, Origin):
        return True
    if isinstance(value, (tuple, list)):
        return any(_has_origin(v) for v in value)
    return isinstance(value, slice) and any(
        isinstance(v, Origin) for v in (value.start, value.stop, value.step)
    )


def _mark(x: Any, facts: list[Fact]) -> Any:
    if facts and isinstance(x, torch.Tensor):
        SIZES.extend((inner(x), fact) for fact in facts)
    return x


class _SizeMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.shape:
            return _sizes_read(args[0], func(*args))
        if name == "size" and isinstance(args[0], torch.Tensor):
            found = _sizes_read(args[0], func(args[0]))
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return found if dim is None else found[int(dim)]
        if name == "__getitem__":
            args = (args[0], _lists_to_slices(args[1]))
        if name == "one_hot":
            out = func(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
            return _mark(out, _classes(out, *args, **kwargs))
        if not (_has_origin(args) or any(_has_origin(v) for v in kwargs.values())):
            out = func(*args, **kwargs)
            return _mark(out, _sizes(name, args, kwargs, out)) if name in LITERAL else out
        out = func(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
        if name in CREATING:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Origin):
                    COUNTED.update(reads_of(value.expression))
        if name in SIZED:
            return _mark(out, _sizes(name, args, kwargs, out))
        if name in SPLIT:
            return _mark_split(args, kwargs, out)
        if name in CONVOLUTIONS:
            _mark_groups(name, args, kwargs, out)
            return out
        if name == "__getitem__":
            return _mark(out, _slices(args[0], args[1]))
        if name not in COUNTING:
            for value in [*args, *kwargs.values()]:
                if isinstance(value, Origin):
                    _pinned(value)
        return out


def _sizes_read(x: torch.Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes that remember `x`, but for those that only data has."""
    READ.append(x)
    number = len(READ) - 1
    sizes = [
        Origin.make(n, ("read", n, number, dim)) if type(n) is int else n
        for dim, n in enumerate(shape)
    ]
    return torch.Size(sizes) if isinstance(shape, torch.Size) else tuple(sizes)


def _lists_to_slices(index: Any) -> Any:
    """x[..., [-2]] as x[..., -2:-1]: the same elements, and a rule can see which."""
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


def _sizes(name: str, args: Any, kwargs: Any, out: Any) -> list[Fact]:
    """What is known of the sizes of a result that are computed, or bare numbers."""
    if not isinstance(out, torch.Tensor):
        return []
    flat, skip = _given(name, args, kwargs, out)
    facts: list[Fact] = []
    for dim, value in enumerate(flat, skip):
        if isinstance(value, Origin):
            facts.append((value.expression, dim, ""))
        elif name in LITERAL and isinstance(value, Integral) and int(value) > 1:
            facts.append((("constant", int(value)), dim, ""))
    return facts


def _given(name: str, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[list[Any], int]:
    """The sizes of a call, and the dim of the result that is the first of them."""
    named = [kwargs[k] for k in ("size", "shape", "sizes") if k in kwargs]
    if name == "unflatten":
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        sizes = list(named[0] if named else args[2])
        return sizes, dim % (out.dim() - len(sizes) + 1)
    given = [v for v in [*args, *named] if isinstance(v, (Integral, tuple, list))]
    listed = next((v for v in given if isinstance(v, (tuple, list))), None)
    sizes = given if listed is None else list(listed)  # the number behind a list is no size
    return sizes, out.dim() - len(sizes)  # expand adds dims on the left


def _classes(out: Any, x: Any, num_classes: int = -1) -> list[Fact]:
    """Where the last size of a one-hot tensor comes from."""
    return [(_expression(num_classes), out.dim() - 1, "")] if num_classes >= 0 else []


def _mark_split(args: Any, kwargs: Any, out: Any) -> Any:
    sizes = (
        args[1]
        if len(args) > 1
        else kwargs.get(
            "split_size_or_sections", kwargs.get("split_size", kwargs.get("split_sizes"))
        )
    )
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()
    each = [sizes] * len(out) if isinstance(sizes, int) else list(sizes)
    return type(out)(
        _mark(
            x,
            [(s.expression, int(dim), "")]
            if isinstance(s, Origin) and int(s) == x.shape[dim]
            else [],
        )
        for x, s in zip(out, each, strict=True)
    )


def _mark_groups(name: str, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    """Groups times the second dim of a kernel are the channels that come in; transposed, go out."""
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    kernel = kwargs.get("weight", args[1] if len(args) > 1 else None)
    if isinstance(groups, Origin) and groups > 1:
        channels = out if "transpose" in name else kwargs.get("input", args[0] if args else None)
        each = _expression(_sizes_read(kernel, kernel.shape)[1])
        dim = channels.dim() - kernel.dim() + 1
        _mark(channels, [(("*", groups.expression, each), dim, "")])


def _slices(x: torch.Tensor, index: Any) -> list[Fact]:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, (torch.Tensor, list)) for i in index):
        return []
    facts: list[Fact] = []
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    source = target = 0
    for i in index:
        if i is Ellipsis:
            source, target = source + x.dim() - used, target + x.dim() - used
        elif i is None:
            target += 1
        elif isinstance(i, slice):
            for bound in ("start", "stop"):
                if isinstance(value := getattr(i, bound), Origin):
                    facts.append((value.expression, target, bound))
            source, target = source + 1, target + 1
        else:
            if isinstance(i, Origin):
                facts.append((i.expression, -1, "index"))
            source += 1
    return facts


@contextmanager
def marked(root: nn.Module, top: nn.Module) -> Iterator[None]:
    """Within, int attributes of modules and their configs remember where they come from.

    What sizes come from is noted while `top` runs, which has `root` in it.
    """
    for facts in (PINNED, READ, SIZES, SOURCES, FIXED, COUNTED):
        facts.clear()
    undo = [(m, dict(m.__dict__), dict(m._buffers)) for m in root.modules()]
    for path, module in root.named_modules():
        for key, value in list(module.__dict__.items()):
            if type(value) is int and not key.startswith("_"):
                module.__dict__[key] = Origin.make(value, ("attribute", path, key, value))
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "__dict__") and hasattr(config, "to_dict"):
            local = copy.copy(config)
            for key, value in list(local.__dict__.items()):
                if type(value) is int and not key.startswith("_"):
                    local.__dict__[key] = Origin.make(
                        value, ("attribute", path, f"config.{key}", value)
                    )
            module.__dict__["config"] = local
    forward = top.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _SizeMode():
            output = forward(*args, **kwargs)
        numbers = {n for _, (expression, _, _) in SIZES for n, _ in reads_of(expression)}
        numbers |= {n for n, _ in FIXED | COUNTED}
        SOURCES.update({n: inner(READ[n]) for n in sorted(numbers)})
        return output

    functools.update_wrapper(watched, forward)
    top.__dict__["forward"] = watched
    try:
        yield
    finally:
        READ.clear()
        for module, attributes, buffers in undo:  # whatever a forward kept is gone as well
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
