"""Markers where tensors enter and leave modules, put into the trace by forward hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.runtime import slots

torch.library.define("shardwright::boundary", "(Tensor x, str tag) -> Tensor")
BOUNDARY = torch.ops.shardwright.boundary.default
"""An identity that only a trace understands; the tag is for `read_tag`."""


def read_tag(tag: str) -> tuple[str, str, str]:
    """Module, side and slot of a marker."""
    module, side, slot = tag.split("|")
    return module, side, slot


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters of a bound `forward`."""
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def map_slots(value: Any, slot: str, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    """`value` with `change(tensor, slot)` in place of every floating tensor in it.

    Those of whole numbers never change their placement at boundaries.
    """

    def floating(x: torch.Tensor, slot: str) -> torch.Tensor:
        return change(x, slot) if x.is_floating_point() else x

    return slots.map_slots(value, slot, floating)


@contextmanager
def marked(root: nn.Module) -> Iterator[list[str]]:
    """Within, every call of a module of `root` marks the floating tensors it takes and returns.

    Gives the paths of the modules that run, the innermost last.
    """
    handles = []
    entered: list[str] = []
    for name, module in root.named_modules():
        names = argument_names(module.forward)

        def enter(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            name: str = name,
            names: list[str] = names,
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            entered.append(name)

            def mark(x: torch.Tensor, slot: str) -> torch.Tensor:
                return BOUNDARY(x, f"{name}|in|{slot}")

            at = [names[i] if i < len(names) else f"*{i - len(names)}" for i in range(len(args))]
            args = tuple(map_slots(a, s, mark) for a, s in zip(args, at, strict=True))
            return args, {k: map_slots(v, k, mark) for k, v in kwargs.items()}

        def leave(_: nn.Module, _args: Any, output: Any, name: str = name) -> Any:
            def mark(x: torch.Tensor, slot: str) -> torch.Tensor:
                return BOUNDARY(x, f"{name}|out|{slot}")

            entered.pop()
            return map_slots(output, "", mark)

        handles += [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, prepend=True),  # users' hooks see what left
        ]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()
