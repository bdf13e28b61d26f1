"""Trace a module on meta into an ATen graph in which every module border is a node.

The module's own Python code runs once (`planner/record.py`). Hooks put a marker where a tensor
enters or leaves a module (`planner/borders.py`), and what sizes come from is noted on the way
(`planner/origins.py`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import ModelError, ShardwrightError
from shardwright.planner import borders, origins, tidy
from shardwright.planner.graph import Graph
from shardwright.planner.record import Record, record
from shardwright.planner.translate import translate


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Trace `module(*args, **kwargs)` without running it on data.

    Use distinct primes for sizes that vary at run time (batch, sequence), so that they can be told
    from sizes of the model.

    Raises:
        ModelError: the module does not run on meta; the message says on what it stumbled.
    """
    graph = translate(run(module, args, kwargs), module, origins.SIZES, origins.SOURCES)
    graph.pinned = set(origins.PINNED)
    reads_as_numbers, reads_as_counts = set(origins.FIXED), set(origins.COUNTED)
    graph.carried = tidy.carried(graph, module)
    tidy.prune_borders(graph)
    tidy.name_literals(graph)
    graph.fixed = tidy.fixed(graph, reads_as_numbers)
    graph.counted = {(graph.reads[n], dim) for n, dim in reads_as_counts if n in graph.reads}
    if "labels" in inspect.signature(module.forward).parameters:
        graph.logits = tidy.logits(graph)
    return graph


def run(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record:
    """Run the module with markers; what its sizes come from is in `origins` afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with borders.marked(module) as entered, origins.marked(module):
                return record(module, args, kwargs, entered)
        except ShardwrightError:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0][:300]
            raise ModelError(
                f"cannot trace {type(module).__name__}: {type(error).__name__}: {text}; "
                "give inputs with which its forward runs on meta tensors"
            ) from error
