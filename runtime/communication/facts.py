"""What ranks must have alike, told by digests that are cheap: the plan, tensors, a module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plan_file import Plan, digest_of

SAMPLES = 16
"""Values of each parameter that are compared."""


def digest(parts: Iterable[object]) -> str:
    """The text of `parts` as "digest" and twelve digits."""
    text = "\n".join(map(str, parts))
    return f"digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def of_plan(plan: Plan) -> str:
    """A digest of all that a plan says, whatever digest it carries."""
    return digest([digest_of(plan.model_dump())])


def of_module(module: nn.Module) -> str:
    """A digest of a whole module: its class, its parameters, and some values of each."""
    named = module.named_parameters(remove_duplicate=False)
    return digest([type(module).__qualname__, *_some_of(named)])


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of tensors by name, and of some values of each."""
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
