"""`OpCall`: a call of an op as a rule sees it, with names, shapes and numbers, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .notation import Rule, Shape, bind, parse


@dataclass(frozen=True)
class Operand:
    """A placeholder for tensor argument number `index`."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """An op, its arguments by schema name (tensors as `Operand`), and operand and result shapes."""

    op: str
    """See `name_of`."""

    arguments: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    operand_dtypes: tuple[torch.dtype, ...] = ()
    result_dtypes: tuple[torch.dtype, ...] = ()

    def shape(self, name: str) -> Shape:
        """Return the shape of the tensor argument `name`."""
        return self.operands[self.arguments[name].index]

    def present(self, name: str) -> bool:
        """Whether the argument `name` is a tensor."""
        return isinstance(self.arguments.get(name), Operand)

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """Return the dim argument `name`, counted from the left."""
        n = len(self.operands[0]) if ndim is None else ndim
        return self.arguments[name] % max(n, 1)

    def dims(self, name: str = "dim") -> list[int]:
        """Return the dims argument `name` (an int, a list, or None for all) as sorted dims >= 0."""
        value, n = self.arguments.get(name), len(self.operands[0])
        if value is None:
            return list(range(n))
        # A scalar accepts dim 0 or -1, but has no dims.
        return sorted({d % n for d in ([value] if isinstance(value, int) else value)}) if n else []

    def floats(self, index: int = 0) -> bool:
        """Whether operand `index` and the first result hold real floating-point numbers."""
        return self.operand_dtypes[index].is_floating_point and (
            self.result_dtypes[0].is_floating_point
        )


RuleMaker = Callable[[OpCall], str | None]
Table = dict[str, str | RuleMaker]
"""Op (`linear`, no overload; see `name_of`) -> rule text, or a function that returns one."""

OWN_NAMESPACE = "aten"


def name_of(op: Any) -> str:
    """Return the name of an overload's op: `linear` for ATen, else `namespace::name`."""
    name = op._opname if hasattr(op, "_opname") else op.__name__
    return qualified(getattr(op, "namespace", OWN_NAMESPACE), name)


def qualified(namespace: str, name: str) -> str:
    """Return the name of an op: without namespace for ATen, else `namespace::name`."""
    return name if namespace == OWN_NAMESPACE else f"{namespace}::{name}"


def packet_named(name: str) -> Any:
    """Return the overload packet of an op from `torch.ops`; None if there is no such op."""
    namespace, _, bare = name.rpartition("::")
    return getattr(getattr(torch.ops, namespace or OWN_NAMESPACE), bare, None)


def make_rule(entry: str | RuleMaker, call: OpCall) -> Rule | None:
    """Return the bound rule of a table entry for `call`; None if the entry has none for it.

    Raises:
        DoesNotFit: the rule is for other shapes.
        LookupError: the rule asks for an argument that the overload does not have.
    """
    text = entry if isinstance(entry, str) else entry(call)
    return None if text is None else _bound(text, call.operands, call.results)


@lru_cache(maxsize=4096)
def _bound(text: str, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> Rule:
    """Parse and bind a rule, cached: each layer of a model has the same calls."""
    return bind(parse(text), operands, results)


def axis_names(n: int) -> list[str]:
    """Return `n` axis names: a0, a1, and so on."""
    return [f"a{i}" for i in range(n)]


def clause(word: str, items: Iterable[str]) -> str:
    """Return the clause ` | word items`, or an empty text if there are no items."""
    text = " ".join(items)
    return f" | {word} {text}" if text else ""


def size_clause(sizes: Mapping[str, int]) -> str:
    """Return the clause that states `sizes`."""
    return clause("size", (f"{name}={n}" for name, n in sizes.items()))
