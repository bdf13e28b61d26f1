"""Small models around one module of torch.nn, or one function of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.planner.equal import Inputs, features

WIDTH, SPACE, CLASSES = 12, 8, 6
"""Features or channels, places along a dim of space, classes."""

Make = Callable[[], Any]
"""Makes a module or a function."""


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and whether its numbers can be compared: some are random."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    compared: bool = True


def random(*shape: int) -> Tensor:
    """Numbers of double precision."""
    return torch.randn(shape, dtype=torch.float64)


class Function(nn.Module):
    """A function of what comes in and of parameters."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        self.weights = nn.ParameterList(torch.randn(s) for s in shapes)

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given, *self.weights)


def as_module(made: Any) -> nn.Module:
    """A module, or one that calls a function."""
    return made if isinstance(made, nn.Module) else Function(made)


class Between(nn.Module):
    """A layer, something, and a layer again where a tensor of features comes out."""

    def __init__(
        self, layer: Callable[[int, int], nn.Module], axis: int, made: Any, x: Tensor
    ) -> None:
        super().__init__()
        self.before, self.made = layer(WIDTH, WIDTH), as_module(made)
        with torch.no_grad():
            out = tensors(self.made(self.before(x)))[0]
        same = out.dim() == x.dim()
        self.after = layer(out.shape[axis], WIDTH) if same else nn.Identity()

    def forward(self, x: Tensor) -> list[Tensor]:
        first, *rest = tensors(self.made(self.before(x)))
        return [self.after(first), *rest]


def tensors(out: Any) -> list[Tensor]:
    """Those in what a module gives out."""
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]


def states(make: Make, **options: Any) -> Case:
    """Between linear layers."""
    x = torch.randn(2, 7, WIDTH)
    return Case(lambda: Between(nn.Linear, -1, make(), x), features(WIDTH), **options)


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def space(n: int, make: Make, **options: Any) -> Case:
    """Between convolutions over `n` dims."""
    shape = (WIDTH, *[SPACE] * n)

    def layer(i: int, o: int) -> nn.Module:
        return CONVOLUTIONS[n](i, o, 1)

    return Case(
        lambda: Between(layer, 1, make(), torch.randn(2, *shape)),
        lambda b, t: (random(b, *shape),),
        **options,
    )


def function(
    call: Callable[..., Any], *shapes: tuple[int, ...], n: int = 0, **options: Any
) -> Case:
    """A function of what a layer makes and of parameters of these shapes."""
    if n:
        return space(n, lambda: Function(call, *shapes), **options)
    return states(lambda: Function(call, *shapes), **options)


def rows(b: int, t: int) -> tuple[Tensor]:
    """Rows of features."""
    return (random(b * t, WIDTH),)


class Last(nn.Module):
    """A module, and a layer behind the first that it gives out."""

    def __init__(self, made: Any, width: int = WIDTH) -> None:
        super().__init__()
        self.made, self.after = as_module(made), nn.Linear(width, WIDTH)

    def forward(self, *given: Tensor) -> Any:
        out = self.made(*given)
        return self.after(out) if isinstance(out, Tensor) else (self.after(out[0]), out[1:])


class Twice(nn.Module):
    """A module that takes two of what layers make."""

    def __init__(self, made: Any, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.made = as_module(made)

    def forward(self, x: Tensor) -> Any:
        return self.made(self.first(x), self.second(x))


def two(make: Make, width: int) -> Case:
    """Of two that layers make."""
    return Case(lambda: Twice(make(), width), features(WIDTH))


@dataclass(frozen=True)
class Loss:
    """How a loss is called with what a layer makes and what is given, and what is given."""

    call: Callable[[Any, Tensor, Tensor], Tensor] = lambda loss, x, y: loss(x, y)
    target: Callable[[int], Tensor] = lambda n: random(n, CLASSES)
    """Of so many rows."""
    rows: Callable[[int, int], int] = lambda b, t: b * t


class Compared(nn.Module):
    """A loss of what layers make, and of what is given."""

    def __init__(self, how: Loss, made: Any) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.made = as_module(made)
        self.__dict__["how"] = how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.how.call(self.made, self.head(self.body(x).relu()), y)


def loss(how: Loss, make: Make) -> Case:
    """Of rows."""

    def inputs(b: int, t: int) -> tuple[Tensor, Tensor]:
        n = how.rows(b, t)
        return random(n, WIDTH), how.target(n)

    return Case(lambda: Compared(how, make()), inputs)
