"""One trial of inputs on meta: how far the code got, and what its layers want.

A layer with weights says how wide its input is. If it is given an argument of the model as it is,
it says so of that argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.errors import first_line
from shardwright.planner.blocks.stacks import find_stacks, shortened
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT
from shardwright.planner.trace.data_queries.model_code import Lines, lines_of
from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.fake_tensor_bridge import run_on_fake

Given = Mapping[str, Any]
"""Values by argument, or by `argument.key` for the entries of a dict."""


@dataclass
class Ended:
    """How a trial ended.

    Attributes:
        runs: Whether the code ran to its end, or to a decision by data.
        steps: The functions of torch that were called, by name: how far it got.
        wants: Argument -> the shape that a layer wants of it. None for any size.
        fits: Arguments that a layer took as they are, and that have the width it wants.
        widths: The width that the layer wants that was entered last, and that of its input.
        error: The first line of what was raised.
        where: The lines of code that were run when it was raised, the innermost last.
        began: Whether the model's code was entered.
    """

    runs: bool = False
    began: bool = False
    steps: list[str] = field(default_factory=list)
    wants: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    fits: set[str] = field(default_factory=set)
    widths: tuple[int, int] | None = None
    error: str = ""
    where: Lines = ()


class _Misfit(Exception):
    """A layer was given an argument of another shape than it wants."""


def arguments(given: Given) -> dict[str, Any]:
    """Return the arguments of a call, with dicts in place of their entries."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        name, _, key = name.partition(".")
        if key:
            out.setdefault(name, {})[key] = value
        else:
            out[name] = value
    return out


def tried(root: nn.Module, given: Given) -> Ended:
    """Return how a call of `root` ends, with one block of each kind."""
    ended = Ended()
    try:
        with shortened(root, find_stacks(root)), duplicated(root) as module, _Steps(ended):
            _watch(module, given, ended)
            run_on_fake(module, [Run("", (), arguments(given))], Opaque(module))
        ended.runs = True
    except DATA_DEPENDENT as error:
        ended.runs, ended.error = True, first_line(error)
    except Exception as error:  # the code may raise anything
        ended.error, ended.where = first_line(error), lines_of(error)
    return ended


class _Steps(TorchFunctionMode):
    """Notes the functions of torch that the model's code calls."""

    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.ended = ended

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.ended.began:
            self.ended.steps.append(getattr(func, "__name__", ""))
        return out


def _watch(root: nn.Module, given: Given, ended: Ended) -> None:
    """Wrap the modules of `root` permanently; what they want is noted in `ended`."""
    by_id: dict[int, str] = {}
    kept: list[Tensor] = []  # so that no other tensor gets the id of one

    def following(layer: nn.Module, forward: Forward) -> Forward:
        @wraps(forward)
        def followed(*args: Any, **kwargs: Any) -> Any:
            if layer is root:
                ended.began = True
                for name in given:
                    value = _at(kwargs, name)
                    if isinstance(value, Tensor):
                        by_id[id(value)] = name
                        kept.append(value)
            elif (wanted := _wanted(layer)) is not None:
                _compare(layer, wanted, args, kwargs, by_id, ended)
            return forward(*args, **kwargs)

        return followed

    for module in root.modules():
        put_around(module, partial(following, module))


def _at(kwargs: Mapping[str, Any], name: str) -> Any:
    name, _, key = name.partition(".")
    value = kwargs.get(name)
    return value.get(key) if key and isinstance(value, Mapping) else value


def _compare(
    layer: nn.Module,
    wanted: tuple[int | None, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    by_id: Mapping[int, str],
    ended: Ended,
) -> None:
    """Compare the input of a layer with what the layer wants.

    Raises:
        _Misfit: it is an argument of the model, and of another shape.
    """
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if first is None:
        return
    convolves = len(wanted) > 1
    at = 1 if convolves else -1
    width = wanted[1 if convolves else 0]
    fits = first.dim() == len(wanted) if convolves else first.dim() > 0
    got = first.shape[at] if first.dim() > 1 else 0
    ended.widths = None if got == width or width is None else (width, got)
    if (name := by_id.get(id(first))) is None:
        return
    if not fits or got != width:
        ended.wants[name] = wanted
        raise _Misfit(f"{type(layer).__name__} wants {list(wanted)} of {name}")
    ended.fits.add(name)


def _wanted(layer: nn.Module) -> tuple[int | None, ...] | None:
    """Return the shape that a layer wants, None for any size; of a linear layer, the width."""
    features, channels = getattr(layer, "in_features", None), getattr(layer, "in_channels", None)
    if isinstance(features, int) and hasattr(layer, "weight"):
        return (features,)
    kernel = getattr(layer, "kernel_size", None)
    if isinstance(channels, int) and isinstance(kernel, tuple) and hasattr(layer, "weight"):
        return (None, channels, *[None] * len(kernel))
    shape = getattr(layer, "normalized_shape", None)
    if isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1:
        return (int(shape[0]),)
    return None
