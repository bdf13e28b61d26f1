"""Torch functions, grouped by what they do with integer arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SIZED = set(
    """
view reshape expand unflatten new_zeros new_ones new_empty new_full zeros ones full empty
_unsafe_view resize broadcast_to
""".split()
)
"""Functions whose integer arguments are sizes of the result."""

LITERAL = {"view", "reshape", "expand", "unflatten", "_unsafe_view", "broadcast_to"}
"""Functions of `SIZED` in which a bare number is a size that the result has on every rank."""

INFERRING = {"view", "reshape"}
"""Functions of `SIZED` that infer a size given as -1, unless the others have the product 0."""

SPLIT = {"split", "split_with_sizes"}
PARTS = {"split", "tensor_split", "chunk", "unbind"}
"""Functions whose results code may go through, as often as lengths say."""

CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
COUNTING = CONVOLUTIONS | set(
    """
arange chunk permute transpose unsqueeze squeeze flatten repeat repeat_interleave narrow pad
layer_norm rms_norm embedding one_hot topk __setitem__ to tile group_norm roll
select sum mean tril triu scaled_dot_product_attention
""".split()
)
"""Functions whose integer arguments are counts or positions, not numbers to compute with."""

CREATING = {"arange", "zeros", "ones", "full", "empty", "eye", "linspace", "rand", "randn"}
"""Functions that create a tensor from sizes alone."""

AT_PLACES = {"__getitem__", "select", "narrow", "chunk", "topk", "pad", "repeat_interleave"}
"""Functions that take elements at given positions, or a given number of elements."""

REPEATING = {"repeat", "tile"}
"""Functions that take one count per dim, aligned at the last dim."""


class Argument(NamedTuple):
    """An argument of a function: its position and its name."""

    place: int
    name: str


COMPUTED_WITH = {
    "full": (Argument(1, "fill_value"),),
    "new_full": (Argument(2, "fill_value"),),
    "pad": (Argument(3, "value"),),
    "tril": (Argument(1, "diagonal"),),
    "triu": (Argument(1, "diagonal"),),
    "roll": (Argument(1, "shifts"),),
    "__setitem__": (Argument(2, "value"),),
    "arange": (Argument(0, "start"), Argument(1, "end"), Argument(2, "step")),
}
"""Function of sizes or counts -> its arguments that the values of the result depend on."""


def numbers_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments of a call that its function computes with (`COMPUTED_WITH`)."""
    for place, key in COMPUTED_WITH.get(name, ()):
        if place < len(args):
            yield args[place]
        elif key in kwargs:
            yield kwargs[key]


def counts_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return how often a call of a function in `REPEATING` repeats each dim."""
    given = [*args[1:], *kwargs.values()]
    listed = given and isinstance(given[0], (tuple, list))
    return list(given[0]) if listed else given
