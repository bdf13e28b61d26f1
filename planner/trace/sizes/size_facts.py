"""Facts about the sizes of a result, from the arguments of a torch function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from shardwright.planner.trace.sizes.expressions import SizeFact
from shardwright.planner.trace.sizes.provenance import SourcedInt, expression_of
from shardwright.planner.trace.sizes.size_functions import LITERAL


def of_sizes(name: str, args: Any, kwargs: Any, out: Any) -> list[SizeFact]:
    """Return facts about sizes of a result that are computed or bare numbers."""
    if not isinstance(out, torch.Tensor):
        return []
    flat, skip = sizes_given(name, args, kwargs, out)
    facts: list[SizeFact] = []
    for place, value in enumerate(flat):
        if isinstance(value, SourcedInt):
            facts.append(SizeFact(value.expression, skip + place, place=place))
        elif name in LITERAL and isinstance(value, Integral) and int(value) > 1:
            facts.append(SizeFact(("constant", int(value)), skip + place, place=place))
    return facts


def sizes_given(name: str, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[list[Any], int]:
    """Return the sizes in the arguments, and the dim of the result that the first one sets."""
    named = [kwargs[k] for k in ("size", "shape", "sizes") if k in kwargs]
    if name == "unflatten":
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        sizes = list(named[0] if named else args[2])
        return sizes, dim % (out.dim() - len(sizes) + 1)
    given = [v for i, v in enumerate([*args, *named]) if _is_size(v, first=i == 0)]
    listed = next((v for v in given if isinstance(v, (tuple, list))), None)
    sizes = given if listed is None else list(listed)  # a number after a list is no size
    return sizes, out.dim() - len(sizes)  # expand adds dims on the left


def _is_size(value: Any, first: bool) -> bool:
    """Return whether an argument is a size or a list of sizes. A first tensor is what gets them."""
    return isinstance(value, (Integral, tuple, list)) or (
        isinstance(value, torch.Tensor) and not first and value.dim() == 0
    )


def of_classes(out: Any, x: Any, num_classes: int = -1) -> list[SizeFact]:
    """Return the fact about the last size of a one-hot tensor."""
    return [SizeFact(expression_of(num_classes), out.dim() - 1)] if num_classes >= 0 else []


def of_repeats(
    x: torch.Tensor, counts: Sequence[Any], out: torch.Tensor, lengths: Sequence[int]
) -> Iterator[SizeFact]:
    """Yield facts about the dims of `out`, which repeats `x` (of these `lengths`) by `counts`.

    A repeated dim of length 1 has the count as its length, other dims the product of both.
    """
    skip = out.dim() - len(counts)
    for dim, count in enumerate(counts, skip):
        if isinstance(count, SourcedInt):
            length = x.dim() - out.dim() + dim
            if length < 0 or x.shape[length] == 1:
                yield SizeFact(count.expression, dim, place=dim - skip)
            else:
                of = expression_of(lengths[length])
                yield SizeFact(("*", count.expression, of), dim)


def split_by(args: Any, kwargs: Any) -> tuple[Any, int]:
    """Return the size, the sizes or the number of the parts of a tensor, and the dim."""
    names = ("split_size_or_sections", "split_size", "split_sizes", "sections", "chunks")
    named = (kwargs.get(k) for k in names)
    by = args[1] if len(args) > 1 else next((v for v in named if v is not None), None)
    return by, (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].dim()


def of_parts(args: Any, kwargs: Any, out: Any) -> Iterator[tuple[torch.Tensor, list[SizeFact]]]:
    """Yield each part that a tensor is split into, with facts about its size."""
    sizes, dim = split_by(args, kwargs)
    alike = isinstance(sizes, int)
    each = [sizes] * len(out) if alike else list(sizes)  # type: ignore[arg-type]
    for i, (x, size) in enumerate(zip(out, each, strict=True)):
        if isinstance(size, SourcedInt) and size.plain == x.shape[dim]:
            yield x, [SizeFact(size.expression, int(dim), place=0 if alike else i)]
        else:
            yield x, []


def of_slices(x: torch.Tensor, index: Any) -> list[SizeFact]:
    """Return facts about slice bounds and positions in an index of `x`."""
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, (torch.Tensor, list)) for i in index):
        return []
    facts: list[SizeFact] = []
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    source = target = 0
    for i in index:
        if i is Ellipsis:
            source, target = source + x.dim() - used, target + x.dim() - used
        elif i is None:
            target += 1
        elif isinstance(i, slice):
            for bound in ("start", "stop"):
                if isinstance(value := getattr(i, bound), SourcedInt):
                    facts.append(SizeFact(value.expression, target, bound))
            source, target = source + 1, target + 1
        else:
            if isinstance(i, SourcedInt):
                facts.append(SizeFact(i.expression, -1, "index"))
            source += 1
    return facts
