"""Plans of older format versions, read as those of today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RENAMED = {"sub_dims": "sub_axes", "whole": "replicated"}
"""Keys of a plan of version 1 -> those of version 2."""


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    out = {RENAMED.get(key, key): value for key, value in data.items()}
    if isinstance(predicted := out.get("predicted"), dict):
        words = {"whole_bytes": "unsharded_bytes"}
        out["predicted"] = {words.get(key, key): value for key, value in predicted.items()}
    return out


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"objective": {"name": "memory"}}  # there was no other


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}
"""Version -> what makes a plan of it one of the next version."""


def upgraded(data: dict[str, Any], version: int) -> dict[str, Any]:
    """A plan's JSON object as one of `version`; as it is where no way leads there."""
    found = data.get("version")
    while type(found) is int and found in STEPS and found < version:
        data = STEPS[found](data) | {"version": found + 1}
        found += 1
    return data
