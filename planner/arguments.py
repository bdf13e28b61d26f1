"""Checks the types of what `shardwright.plan` is given, so that no wrong one fails further in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.search.meshes import Cluster

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "tp batch seq gpus_per_host optimizer_bytes": ((int,), "an int"),
    "time_limit expert_imbalance": ((int, float), "a number"),
    "memory": ((int, Sequence), "an int of bytes, or one for each rank"),
    "speeds": ((Sequence,), "a list of numbers, one for each rank"),
    "args": ((Sequence, Tensor), "a tuple of inputs, or a tensor"),
    "kwargs": ((Mapping, Sequence), "a dict of inputs by name, or a list of such dicts"),
    "pins": ((Mapping,), "a dict: name -> 'replicate' or 'shard:DIM'"),
    "phase tp_plan": ((str, Mapping), "text or a dict"),
    "device solver revision subfolder": ((str,), "text"),
    "cluster": ((Cluster,), "a shardwright.Cluster"),
    "dump write_model cache_dir": ((str, PathLike), "a path"),
    "continuous_batching dequantize trust_remote_code local_files_only sequence_parallel": (
        (bool,),
        "True or False",
    ),
}
"""Arguments -> the types that they may have besides None, and these in words."""
EACH: dict[str, tuple[type, ...]] = {"memory": (int,), "speeds": (int, float), "kwargs": (Mapping,)}
"""Argument -> the types of its elements, if it is a list."""


def check_types(given: Mapping[str, Any]) -> None:
    """Check the types of arguments of `plan`.

    Raises:
        UsageError: one has another type than it may have.
    """
    for names, (types, words) in KINDS.items():
        for name in names.split():
            value = given[name]
            if value is not None and not (_is(value, types) and _elements_are(name, value)):
                raise UsageError(f"{name} must be {words}, not {value!r:.60}")


def _elements_are(name: str, value: Any) -> bool:
    listed = name in EACH and isinstance(value, Sequence)
    return not listed or all(_is(each, EACH[name]) for each in value)


def _is(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types: True is no number, and text is no list."""
    if isinstance(value, bool | str | bytes):
        return type(value) in types
    return isinstance(value, types)
