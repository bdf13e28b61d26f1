"""Functions of torch by what they do with the integers that they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SIZED = set(
    """
view reshape expand unflatten new_zeros new_ones new_empty new_full zeros ones full empty
_unsafe_view resize broadcast_to
""".split()
)
"""Functions whose integers are sizes of the result."""

LITERAL = {"view", "reshape", "expand", "unflatten", "_unsafe_view", "broadcast_to"}
"""Those in which a bare number is a size that the result must have on every rank."""

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

AT_PLACES = {"__getitem__", "select", "narrow", "chunk", "topk", "pad", "repeat_interleave"}
"""Functions that take elements at places, or so many: of one tensor not the same with others."""

REPEATING = {"repeat", "tile"}
"""Functions that take counts for dims, the last one last."""


class Argument(NamedTuple):
    """One argument of a function: its place, and its name."""

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
"""Of functions of sizes and counts: what is a number, which the values of the result hang on."""


def numbers_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of a call that its function computes with (`COMPUTED_WITH`)."""
    for place, key in COMPUTED_WITH.get(name, ()):
        if place < len(args):
            yield args[place]
        elif key in kwargs:
            yield kwargs[key]


def counts_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """How often a call of one of `REPEATING` repeats each dim."""
    given = [*args[1:], *kwargs.values()]
    listed = given and isinstance(given[0], (tuple, list))
    return list(given[0]) if listed else given
