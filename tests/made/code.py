"""The `forward` of a module while it is drawn: its lines and tensors, and what `__init__` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.rules.draw import Draw

Factor = int | str
"""A number of the model, or code that gives one of a call: `b`, `t`, `(t - 1)`."""

Size = tuple[Factor, ...]
"""What a dim is the product of, major to minor."""

LARGEST = 96
"""No dim gets longer than that, as far as it is the model's."""


class Var(NamedTuple):
    """A tensor of real numbers in the code: its name, and its sizes."""

    name: str
    dims: tuple[Size, ...]

    @property
    def last(self) -> int | None:
        """The size of the last dim, where it is a number of the model."""
        return number(self.dims[-1]) if self.dims else None


class Block(NamedTuple):
    """A class of blocks that may be used."""

    kind: str
    width: int
    """Of what comes in."""

    out: int
    takes: bool
    """Whether it is given a number, too."""

    gives: bool
    """Whether it gives one, too."""

    keeps: tuple[str, ...]
    """Its attributes with numbers."""


class Unfit(Exception):
    """There is nothing that the drawn statement could be about."""


class Code:
    """A forward that is being drawn.

    Args:
        draw: What draws.
        inputs: The tensors that it is given.
        blocks: What blocks may be used.
        numbers: Names of numbers that it is given.
    """

    def __init__(
        self,
        draw: Draw,
        inputs: Sequence[Var],
        blocks: Sequence[Block] = (),
        numbers: Sequence[str] = (),
    ) -> None:
        self.draw, self.vars, self.blocks = draw, list(inputs), blocks
        self.numbers = ["b", "t", *numbers]
        self.init: list[str] = []
        self.lines: list[str] = []
        self.count = 0

    def name(self, prefix: str) -> str:
        """A new name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def own(self, prefix: str, value: str) -> str:
        """An attribute that `__init__` sets."""
        name = self.name(prefix)
        self.init.append(f"self.{name} = {value}")
        return f"self.{name}"

    def buffer(self, value: str) -> str:
        """A buffer."""
        name = self.name("buffer")
        self.init.append(f'self.register_buffer("{name}", {value})')
        return f"self.{name}"

    def let(self, text: str, dims: Sequence[Size]) -> Var:
        """A new tensor."""
        var = Var(self.name("v"), tuple(dims))
        self.lines.append(f"{var.name} = {text}")
        self.vars.append(var)
        return var

    def pick(self, fits: Callable[[Var], object] = lambda v: True) -> Var:
        """One of the tensors that fit, late ones more often.

        Raises:
            Unfit: none does.
        """
        found = [v for v in self.vars if fits(v)]
        if not found:
            raise Unfit
        return self.draw.pick(*found[-1:] * 3, *found[-3:] * 2, *found)

    def dim(self, var: Var, fits: Callable[[Size], object] = lambda size: True) -> int:
        """One of the dims of `var` whose sizes fit.

        Raises:
            Unfit: none does.
        """
        found = [i for i, size in enumerate(var.dims) if fits(size)]
        if not found:
            raise Unfit
        return self.draw.pick(*found)

    def at(self, var: Var, dim: int) -> int:
        """The same dim, counted from either end."""
        return dim - len(var.dims) if self.draw.flag() else dim

    def size(self, size: Size) -> str:
        """Code for a size: a number, an attribute, or read off a tensor, or computed of one."""
        value = number(size)
        if value is None:
            return " * ".join(str(f) for f in size)
        ways = [str(value), self._attribute(value), *self._read(value)]
        return self.draw.pick(*ways, ways[-1])

    def _attribute(self, value: int) -> str:
        line = f"self.n{value} = {value}"
        if line not in self.init:
            self.init.append(line)
        return f"self.n{value}"

    def _read(self, value: int) -> list[str]:
        found = [(v, i, n) for v in self.vars for i, s in enumerate(v.dims) if (n := number(s))]
        exact = [f"{v.name}.shape[{i}]" for v, i, n in found if n == value]
        parts = [
            f"{v.name}.size({i}) // {n // value}"
            for v, i, n in found
            if n > value and not n % value
        ]
        return exact[-2:] + parts[-1:]


def number(size: Size) -> int | None:
    """A size that is a number of the model; 1 of none."""
    out = 1
    for factor in size:
        if isinstance(factor, str):
            return None
        out *= factor
    return out


def is_number(size: Size) -> bool:
    """Whether a size is the model's."""
    return number(size) is not None


def plain(var: Var) -> bool:
    """Whether a tensor is [batch, sequence, features]."""
    return len(var.dims) == 3 and var.dims[:2] == (("b",), ("t",)) and is_number(var.dims[2])
