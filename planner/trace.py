"""Trace a module on meta into an ATen graph in which every module border is a node.

`torch.export` runs the module's own Python code, so hooks can put two markers into the graph: one
where a tensor enters or leaves a module (`planner/borders.py`), and one where an integer that comes
from an attribute becomes a size (`planner/origins.py`). Markers are identities.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, default_decompositions

from shardwright.errors import ModelError, ShardwrightError
from shardwright.planner import borders, origins, tidy
from shardwright.planner.graph import Graph
from shardwright.planner.translate import translate

aten = torch.ops.aten

LEAVES = (
    aten.linear.default,
    aten.scaled_dot_product_attention.default,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.cross_entropy_loss.default,
)
"""Ops that have a rule of their own and so are not decomposed."""


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Trace `module(*args, **kwargs)` without running it on data.

    Use distinct primes for sizes that vary at run time (batch, sequence), so that they can be told
    from sizes of the model.

    Raises:
        ModelError: the module cannot be exported; the message names the place.
    """
    graph = translate(export(module, args, kwargs), module)
    graph.pinned = set(origins.PINNED)
    reads_as_numbers, reads_as_counts = set(origins.FIXED), set(origins.COUNTED)
    tidy.read_own_alias(graph)
    graph.carried = tidy.carried(graph, module)
    tidy.prune_borders(graph)
    tidy.name_literals(graph)
    graph.fixed = tidy.fixed(graph, reads_as_numbers)
    graph.counted = {(graph.reads[n], dim) for n, dim in reads_as_counts if n in graph.reads}
    if "labels" in inspect.signature(module.forward).parameters:
        graph.logits = tidy.logits(graph)
    return graph


def export(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """Export with markers, decomposed to ATen but for LEAVES."""
    table = default_decompositions()
    for leaf in LEAVES:
        table.pop(leaf, None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with borders.marked(module), origins.marked(module):
                program = torch.export.export(module, args, dict(kwargs), strict=False)
            return program.run_decompositions(table)
        except ShardwrightError:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0][:300]
            raise ModelError(
                f"cannot trace {type(module).__name__}: {type(error).__name__}: {text}; "
                "give inputs with which its forward runs on meta tensors"
            ) from error
