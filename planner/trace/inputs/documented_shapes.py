"""Arguments whose shapes the docs of a forward say.

A line such as "states (`torch.Tensor` of shape `(batch_size, length, state_dim)`):" says the dtype
and the dims. A name in it is an entry of a config, or else a length that may be anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.trace.inputs.subject import Subject, sides

LINE = re.compile(
    r"^\s*(?P<name>\w+) \(`(?:torch\.)?(?P<kind>\w*)Tensor`\s+of shape\s+"
    r"`[(\[](?P<dims>[^`]*)[)\]]`(?P<more>.*)\):",
    re.MULTILINE,
)
"""One argument in the docs of a forward."""

DTYPES = {"Long": torch.int64, "Int": torch.int32, "Bool": torch.bool}
"""Word in front of Tensor -> dtype; others are floating."""

WIDTHS = {"dim": "hidden_size"}
"""Name of a dim in docs -> the entry of a config that has it."""

SIDES = ({"height", "image_size"}, {"width", "image_size"})
"""Names for the height and the width of an image, which are the last two dims."""


@dataclass(frozen=True)
class Documented:
    """What the docs say of one argument."""

    dims: str
    dtype: torch.dtype | None
    optional: bool


def documented(at: Subject) -> Mapping[str, Documented]:
    """Return what the docs of the forward say of each argument whose shape they have."""
    found = LINE.finditer(type(at.module).forward.__doc__ or "")
    return {
        line["name"]: Documented(line["dims"], DTYPES.get(line["kind"]), "optional" in line["more"])
        for line in found
        if line["name"] in at.names
    }


def as_documented(at: Subject, name: str) -> Tensor | None:
    """Return a tensor on meta with the shape that the docs say; None if they say none."""
    found = documented(at).get(name)
    if found is None:
        return None
    try:
        dims = [*ast.iter_child_nodes(ast.parse(f"[{found.dims}]", mode="eval").body)][:-1]
        shape = [_size(at, dim) for dim in dims]
    except (SyntaxError, NotImplementedError):  # words, or a choice between shapes
        return None
    high_wide = next((s for config in at.configs if (s := sides(config))), None)
    if high_wide and len(dims) > 1:
        for i, side in zip((-2, -1), high_wide, strict=True):
            dim = dims[i]
            shape[i] = side if isinstance(dim, ast.Name) and dim.id in SIDES[i] else shape[i]
    return torch.empty(shape, dtype=found.dtype or at.dtype, device="meta")


def _size(at: Subject, dim: ast.AST) -> int:
    """Return the size of a dim: a number, an entry of a config, or a sum or product of these."""
    match dim:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _size(at, left) + _size(at, right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _size(at, left) * _size(at, right)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(attr=key)]):
            return _length(at, key)
        case ast.Attribute(attr=key) | ast.Name(id=key):
            if key == "batch_size":
                return TRACE_BATCH
            return at.number(WIDTHS.get(key, key)) or TRACE_SEQ
        case _:
            raise NotImplementedError


def _length(at: Subject, key: str) -> int:
    values: list[Any] = [getattr(config, key, None) for config in at.configs]
    return next((len(v) for v in values if isinstance(v, (list, tuple))), TRACE_SEQ)
