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

from shardwright.planner.contract.names import MASKS
from shardwright.planner.trace.inputs.argument_options import BESIDE, OPTIONS, beside, options
from shardwright.planner.trace.inputs.documented_shapes import documented
from shardwright.planner.trace.inputs.subject import Subject

CONTENT = ("input_ids", "pixel_values", "input_features", "input_values", "bbox")
"""Arguments that models may need although they have a default: pairs of towers take two."""

VIDEOS = "pixel_values_videos"
"""The same, where a model takes no images."""


def example_inputs(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[dict[str, Any]]:
    """Yield inputs that `module` may run with, by name; none if its first argument is unknown.

    Floating inputs have the dtype `dtype`, or that of the parameters. Tensors are on meta, except
    for those with values.
    """
    at = Subject(module, dtype)
    for chosen in _choices(at):
        # What comes with another argument, such as a grid with patches, replaces what docs say.
        by_docs_first = sorted(chosen, key=lambda name: name in OPTIONS)
        each = [[*options(at, name)] for name in by_docs_first]
        made = {name for found in each for option in found for name in option}
        rest = [name for name in at.needed if name not in made]
        more = [n for n in at.names if n in rest or (n in BESIDE and n not in made)]
        unpadded = [n for n in more if n in rest or n not in MASKS]  # further calls have padding
        for names in {tuple(names): 0 for names in (rest, unpadded, more)}:
            for parts in product(*each):
                given: dict[str, Any] = {k: v for part in parts for k, v in part.items()}
                for values in beside(names, tuple(given[chosen[0]].shape), at.needed):
                    yield {**given, **values}


def _choices(at: Subject) -> Iterator[list[str]]:
    """Yield names of arguments to make: those that are needed, then more."""
    # Masks are as long as what they mask, whatever docs say.
    docs = {name: said for name, said in documented(at).items() if name not in BESIDE}
    known = [name for name in at.names if name in OPTIONS or name in docs]
    first = [name for name in known if name in at.needed or name in at.main] or [
        name for name in list(at.names)[:1] if name in OPTIONS
    ]
    if not first:
        return
    yield first
    said = [name for name in docs if not docs[name].optional and name not in first]
    content = CONTENT if "pixel_values" in at.names else (*CONTENT, VIDEOS)
    others = [name for name in content if name in at.names and name not in first]
    others += [name for name in ("encoder_hidden_states",) if name in known and name not in first]
    for more in (said, *([name] for name in others), others[: len(others) * (len(others) > 1)]):
        if more:
            yield [*first, *more]
