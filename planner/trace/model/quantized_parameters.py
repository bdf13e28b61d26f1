"""Finds which parameters of a model are quantized in its checkpoint, and their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from torch import nn

from shardwright.errors import CheckpointError
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.views import is_view
from shardwright.runtime.quantized.config import Quantization
from shardwright.runtime.quantized.layout import Mismatch, block, stored_bits

LINEAR = "Linear"
"""The class by which configs name modules that multiply by one matrix."""


class Packing(NamedTuple):
    """How a parameter is stored.

    Attributes:
        bits: of an element, with its scales.
        block: rows and columns that share a scale; 0 for all of them.
    """

    bits: Fraction
    block: tuple[int, int]


def quantized_parameters(
    module: nn.Module, quantization: Quantization | None
) -> dict[str, Packing]:
    """Return the parameters that the config says are quantized.

    These are the matrices of linear layers, and stacks of matrices, such as those of experts, which
    checkpoints hold as linear layers.

    Raises:
        CheckpointError: no weight can be stored so.
    """
    out: dict[str, Packing] = {}
    if quantization is None:
        return out
    from transformers.pytorch_utils import Conv1D  # a linear layer with its weight transposed

    for path, owner in module.named_modules():
        for name, shape in _matrices(owner):
            kind = LINEAR if isinstance(owner, nn.Linear | Conv1D) else type(owner).__name__
            scheme = quantization.scheme(path, kind)
            if scheme is None and len(shape) > 2:
                scheme = quantization.scheme(path, LINEAR)
            if scheme is not None:
                full = f"{path}.{name}" if path else name
                form, given = scheme.formats[0], scheme.parameters
                try:
                    out[full] = Packing(stored_bits(form, given, shape), block(form, given))
                except Mismatch as error:
                    raise CheckpointError(
                        f"{full} cannot be stored as the quantization_config says of {form.name}: "
                        f"{error}. Use the checkpoint that it was made from"
                    ) from None
    return out


def _matrices(owner: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in owner.named_parameters(recurse=False):
        if not parameter.is_floating_point() or isinstance(owner, nn.modules.conv._ConvNd):
            continue
        linear = name == "weight" and parameter.dim() == 2 and not isinstance(owner, nn.Embedding)
        if linear or parameter.dim() == 3:
            yield name, tuple(parameter.shape)


def mark_quantized(graph: Graph, quantized: Mapping[str, Packing]) -> None:
    """Note in the graph how many bits its quantized parameters take, and the views of them."""
    if not quantized:
        return
    bits = {}
    for use in graph.uses:
        if use.fqn in quantized:
            bits[use.stored] = bits[use.used] = quantized[use.fqn].bits
    for op in graph.ops:
        if op.inputs and op.inputs[0] in bits and is_view(op.call):
            bits |= {out: bits[op.inputs[0]] for out in op.outputs}
    graph.tensors.update({name: replace(graph.tensors[name], bits=b) for name, b in bits.items()})
