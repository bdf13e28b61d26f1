"""Functions with closures among the attributes of modules, and the modules that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.plain_values import enclosed
from shardwright.runtime.subclasses import copy_of

OWN = vars(nn.Module()).keys()
"""Attributes that every module has."""


def functions(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, FunctionType]]:
    """Functions with a closure among attributes: path, module, attribute, function."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and isinstance(value, FunctionType) and value.__closure__:
                yield path, module, name, value


def check_closures(model: nn.Module) -> None:
    """Raise PlanError if a function in `model` holds modules that are not in `model`.

    They would run unsplit. A copy of a model, for example, keeps the functions of the original.
    """
    inside: set[int] = set()
    for path, _, name, function in functions(model):
        inside = inside or set(map(id, model.modules()))
        if any(isinstance(v, nn.Module) and id(v) not in inside for v in enclosed(function)):
            where = f"{path}.{name}" if path else name
            raise PlanError(
                f"'{where}' is a function with modules of another {type(model).__name__}, as in a "
                "copy of a model: build the model again, or set the function again"
            )


def rebound(function: FunctionType, change: Callable[[Any], Any]) -> FunctionType:
    """A copy of `function` with `change` applied to each closure variable."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(type(cell)(change(cell.cell_contents)))
        except ValueError:
            cells.append(cell)
    return copy_of(function, closure=tuple(cells))
