"""Optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.uses.subject import Subject, use, weigh
from shardwright.runtime.state.gather import full_tensors


def _stepped(s: Subject, optimizer: Any, clip: float | None = None) -> Any:
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        weigh(s.call()).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(s.model.parameters(), clip))
        optimizer.step()
    return [norms, full_tensors(s.model, dict(s.model.named_parameters()))]


@use(tolerance=1e-6)
def adamw(s: Subject) -> Any:
    """Three steps."""
    return _stepped(s, torch.optim.AdamW(s.model.parameters(), lr=1e-3, eps=1e-3))


@use(tolerance=1e-6)
def sgd(s: Subject) -> Any:
    """Three steps with momentum."""
    return _stepped(s, torch.optim.SGD(s.model.parameters(), lr=1e-5, momentum=0.9))


@use(tolerance=1e-6)
def clipped(s: Subject) -> Any:
    """Three steps with clipping, and the norms."""
    return _stepped(s, torch.optim.SGD(s.model.parameters(), lr=1e-2), clip=0.5)


@use(tolerance=1e-6, may_refuse=True)
def adafactor(s: Subject) -> Any:
    """An optimizer with statistics over a tensor.

    It makes all gradients of one size, also those that are 0 but for rounding (of biases of keys).
    """
    return _stepped(s, torch.optim.Adafactor(s.model.parameters(), lr=1e-2, eps=(1e-6, 1e-3)))
