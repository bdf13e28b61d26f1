"""Finds what a hand-written table cuts inside a block of FP8 weights, which share one scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwright.planner.contract.names import pattern
from shardwright.planner.problem.tp_plan import Rules, split_dim, style_of

BLOCK = 128
"""Rows and columns of a block, as in transformers' fine-grained FP8."""


def cuts_in_blocks(module: nn.Module, rules: Rules, ranks: int) -> dict[str, str]:
    """Return the weights, with * for layers, that a table cuts inside a block: the cut in words.

    These are weights of linear layers and stacked experts. Heads and embeddings are not quantized.
    """
    out = {}
    for name, parameter in _quantized(module):
        if name not in rules.parameters:
            continue
        style = style_of(rules.parameters[name])
        dim = split_dim(style, name, parameter.dim())
        if dim is None:
            continue
        whole = parameter.shape[dim] // style.parts
        if whole > BLOCK and whole % (ranks * BLOCK):
            part = f"{whole / ranks:g}"
            out[pattern(name)] = f"dim {dim} of {parameter.shape[dim]} cut after {part}"
    return out


def _quantized(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights that transformers' fine-grained FP8 quantizes."""
    model: Any = module
    kept = set()
    for of in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found = getattr(model, of)()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        kept |= {id(p) for p in found.parameters()} if isinstance(found, nn.Module) else set()
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            linear = isinstance(owner, nn.Linear) and name == "weight"
            if (linear or parameter.dim() == 3) and id(parameter) not in kept:
                yield f"{path}.{name}".strip("."), parameter
