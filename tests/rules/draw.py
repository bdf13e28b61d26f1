"""Calls of ops to be drawn: what stands where a tensor goes, and how hypothesis draws the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from hypothesis import strategies as st

Shape = tuple[int, ...]


@dataclass(frozen=True)
class T:
    """A tensor argument: its values are drawn anew for each seed."""

    shape: Shape
    kind: str = "normal"
    high: int = 1
    dtype: torch.dtype = torch.float64

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Values of this kind."""
        return KINDS[self.kind](self, generator)


def _uniform(t: T, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(t.shape, generator=generator, dtype=torch.float64)


def _normal(t: T, generator: torch.Generator) -> torch.Tensor:
    # Wide enough that clipping and rounding show.
    return 3 * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)


def _integers(t: T, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(t.high, t.shape, generator=generator)


def _distinct(t: T, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(t.high, generator=generator)[: t.shape[0]]


def _complex(t: T, generator: torch.Generator) -> torch.Tensor:
    return torch.complex(_normal(t, generator), _normal(t, generator))


def _offsets(t: T, generator: torch.Generator) -> torch.Tensor:
    ends = torch.randint(t.high + 1, t.shape, generator=generator).sort().values
    ends[-1] = t.high
    return ends.int()


def _starts(t: T, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(t.high, t.shape, generator=generator).sort().values
    starts[0] = 0
    return starts


KINDS: dict[str, Callable[[T, torch.Generator], torch.Tensor]] = {
    "ascending": lambda t, g: _normal(t, g).sort().values,
    "all": lambda t, g: torch.full(t.shape, t.high),
    "above": lambda t, g: 1.1 + _uniform(t, g),
    "bool": lambda t, g: torch.rand(t.shape, generator=g) < 0.5,
    "complex": _complex,
    "distinct": _distinct,
    "integers": _integers,
    "normal": _normal,
    "offsets": _offsets,
    "so many": lambda t, g: torch.randperm(t.shape[0], generator=g) < t.high,
    "positive": lambda t, g: 0.1 + 0.8 * _uniform(t, g),
    "starts": _starts,
    "steps": lambda t, g: _integers(t, g).double(),
}


@dataclass(frozen=True)
class Example:
    """A call of an overload (`"add.Tensor"`), tensors as `T`."""

    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(overload: str, *args: Any, **kwargs: Any) -> Example:
    """The call `overload(*args, **kwargs)`."""
    return Example(overload, args, kwargs)


class _DrawFunction(Protocol):
    def __call__(self, strategy: st.SearchStrategy[Any], /) -> Any: ...


class Draw:
    """Short words for what examples draw."""

    def __init__(self, draw: _DrawFunction) -> None:
        self._draw = draw

    def size(self, low: int = 1, high: int = 5) -> int:
        """An integer, both ends included."""
        return self._draw(st.integers(low, high))

    def shape(self, low: int = 1, high: int = 3) -> Shape:
        """Of `low` to `high` dims."""
        return tuple(self._draw(st.lists(st.integers(1, 5), min_size=low, max_size=high)))

    def flag(self) -> bool:
        """True or false."""
        return self._draw(st.booleans())

    def pick(self, *options: Any) -> Any:
        """One of them."""
        return self._draw(st.sampled_from(options))

    def dim(self, n: int) -> int:
        """A dim of `n`, counted from either end; 0 or -1 of a scalar."""
        return self.size(-max(n, 1), max(n, 1) - 1)

    def dims(self, n: int, low: int = 1) -> list[int]:
        """Several different dims of `n`, each counted from either end."""
        some = self.order(n)[: self.size(min(low, n), n)]
        return [d - n if self.flag() else d for d in some]

    def order(self, n: int) -> list[int]:
        """A permutation of `n` dims."""
        return self._draw(st.permutations(range(n)))

    def broadcast(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`: without leading dims, or with ones."""
        kept = shape[self.pick(0, 0, self.size(0, len(shape))) :]
        return tuple(1 if self.size(0, 3) == 0 else n for n in kept)

    def cut(self, total: int) -> list[int]:
        """Sizes of parts, some maybe empty, that add up to `total`."""
        ends = sorted(self.size(0, total) for _ in range(self.size(0, 3)))
        return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]


Maker = Callable[[Draw], Example]
Makers = dict[str, Sequence[Maker]]


def examples(makers: Sequence[Maker]) -> st.SearchStrategy[Example]:
    """Calls that one of `makers` draws."""

    @st.composite
    def build(draw: _DrawFunction) -> Example:
        return draw(st.sampled_from(makers))(Draw(draw))

    return build()
