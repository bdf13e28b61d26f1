"""Example inputs for a module, from the names of its arguments and the sizes in its config.

Arguments that must be given come first, then what a model may take beside them: an image beside
text, say. A trial run shows which of the inputs the module runs with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from shardwright.planner.trace.runs.argument_options import BESIDE, OPTIONS, Subject, beside

CONTENT = ("input_ids", "pixel_values", "input_features", "input_values", "bbox")
"""Arguments that models may need although they have a default: pairs of towers take two."""


def example_inputs(module: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield inputs that `module` may run with, by name; none if its first argument is unknown.

    Floating inputs have the dtype `dtype`. Tensors are on meta, except for those with values.
    """
    at = Subject(module, dtype)
    for chosen in _choices(at):
        options = [list(OPTIONS[name](at, name)) for name in chosen]
        made = {name for option in options for each in option for name in each}
        rest = [name for name in at.needed if name not in made]
        more = [n for n in at.names if n in rest or (n in BESIDE and n not in made)]
        for names in (rest, more)[: 1 + (rest != more)]:
            for parts in product(*options):
                given: dict[str, Any] = {k: v for part in parts for k, v in part.items()}
                shape = tuple(given[chosen[0]].shape)
                for values in product(*(beside(name, shape) for name in names)):
                    yield {**given, **dict(zip(names, values, strict=True))}


def _choices(at: Subject) -> Iterator[list[str]]:
    """Yield names of arguments to make: those that are needed, then more."""
    main = main_inputs(at.module)
    first = [name for name in at.names if name in OPTIONS and (name in at.needed or name in main)]
    if not first:
        first = [name for name in list(at.names)[:1] if name in OPTIONS]
    if not first:
        return
    yield first
    others = [name for name in CONTENT if name in at.names and name not in first]
    for name in others:
        yield [*first, name]
    if len(others) > 1:
        yield [*first, *others]


def main_inputs(module: nn.Module) -> list[str]:
    """Return what a model of transformers names as its main inputs."""
    main = getattr(module, "main_input_name", None)
    return [main] if isinstance(main, str) else list(main or ())
