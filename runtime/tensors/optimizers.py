"""Optimizers that cannot train parameters of which ranks have parts: refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.errors import UsageError

REFUSED = {"Adafactor": "keeps statistics of whole rows and columns, in plain tensors of its own"}
"""Class of an optimizer of others, and why; those of torch keep all as DTensors."""


@cache
def watch_optimizers() -> None:
    """From now on, refuse such a one when it is to make a step."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "_shardwright_cut") for p in every):
        raise UsageError(
            f"a parameter of this {type(optimizer).__name__} was put into a split model, of which "
            "each rank keeps a part: give the optimizer model.parameters() as they are now"
        )
    why = REFUSED.get(type(optimizer).__name__)
    if why is None or type(optimizer).__module__.startswith("torch."):
        return
    if any(
        isinstance(p, DTensor) and not all(x.is_replicate() for x in p.placements) for p in every
    ):
        raise UsageError(
            f"{type(optimizer).__name__} {why}, and a rank of a split model has parts of these: "
            "use torch.optim.Adafactor, AdamW, SGD, Adagrad, RMSprop or Muon"
        )
