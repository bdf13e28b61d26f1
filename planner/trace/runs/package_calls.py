"""Example inputs for models of diffusers and timm, made from their configs and signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.graph.trace_sizes import TRACE_BATCH
from shardwright.planner.trace.inputs.searched_inputs import Search
from shardwright.planner.trace.inputs.subject import Subject
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trials import Trial, Trials
from shardwright.runtime.model.packages import is_of_diffusers, is_of_timm

Inputs = dict[str, Any]

USUAL = 3, 224, 224
"""Channels, height and width of pictures."""


def package_calls(module: nn.Module) -> list[Inputs]:
    """Return the inputs of the plain call, and of further ones; none for other packages' models.

    Raises:
        ModelError: no inputs were found with which the model runs.
    """
    if is_of_diffusers(module):
        return _denoised(module)
    return [_pictures(module)] if is_of_timm(module) else []


def _denoised(module: nn.Module) -> list[Inputs]:
    search = Search(module)
    if search.run():
        return search.calls()
    tried = ", ".join(f"{name} {_text(value)}" for name, value in search.given.items())
    todo = "give example inputs, as --inputs FILE.py:FUNCTION or kwargs"
    takes = f"{type(module).__name__}, whose forward takes {', '.join(search.at.names)}"
    if search.unknown:
        names = ", ".join(search.unknown)
        raise ModelError(f"do not know the inputs of {takes}: what {names} may be: {todo}")
    raise ModelError(
        f"do not know the inputs of {takes}: with {tried} it ends with "
        f"'{search.ended.error:.160}': {todo}"
    )


def _text(value: Any) -> str:
    return str([*value.shape]) if isinstance(value, torch.Tensor) else str(value)


def _pictures(module: nn.Module) -> Inputs:
    """Return pictures of the size that timm says, or of the usual one.

    Raises:
        ModelError: the model runs with neither.
    """
    from timm.data import resolve_model_data_config  # pyright: ignore[reportMissingImports]

    at = Subject(module)
    said = tuple(resolve_model_data_config(module)["input_size"])
    name, trials = next(iter(at.names)), Trials(module)
    for size in dict.fromkeys((said, USUAL)):
        inputs = {name: at.floats(TRACE_BATCH, *size)}
        if trials.attempt(Run("", (), inputs)) is not Trial.FAILS:
            return inputs
    raise ModelError(
        f"{type(module).__name__} does not run with pictures of {[*said]}: give example inputs, as "
        "--inputs FILE.py:FUNCTION or args"
    )
