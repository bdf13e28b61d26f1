"""Cheap digests of what must be equal on all ranks: the plan, tensors, a module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plan_file import Plan

SAMPLES = 16
"""Values compared for each parameter."""


def digest(parts: Iterable[object]) -> str:
    """Return "digest" and the first twelve hex digits of the hash of `parts`."""
    text = "\n".join(map(str, parts))
    return f"digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def of_plan(plan: Plan) -> str:
    """Return the start of the digest of a plan that is `unedited`."""
    return f"digest {plan.digest[:12]}"


def of_module(module: nn.Module) -> str:
    """Return a digest of a module's class, its parameters, and some values of each."""
    named = module.named_parameters(remove_duplicate=False)
    return digest([type(module).__qualname__, *_some_of(named)])


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of tensors by name, and of some values of each."""
    return digest(_some_of(named))


def _some_of(named: Iterable[tuple[str, Tensor]]) -> list[object]:
    parts: list[object] = []
    with torch.no_grad():
        for name, p in named:
            parts += [name, p.dtype, tuple(p.shape), p.requires_grad]
            if not p.is_meta and p.numel():
                values = p.reshape(-1)[:: -(-p.numel() // SAMPLES)]
                parts.append(values.contiguous().view(torch.uint8).tolist())
    return parts
