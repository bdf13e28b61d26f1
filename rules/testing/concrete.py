"""`Concrete`: a call of an op with values, to run on full tensors and on one rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..call import OpCall, Operand, name_of
from ..notation import Rule
from .parts import Parts

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Concrete:
    """A call of an overload. `arguments` are by schema name, with tensors as `Operand`."""

    overload: Any
    arguments: Mapping[str, Any]
    tensors: Tensors

    has_gradient: bool = True

    values_matter: bool = True
    """Whether values are compared. If not, as for empty or random tensors, only shapes are."""

    fixed: frozenset[int] = frozenset()
    """Operands that get no gradient."""

    @property
    def op(self) -> str:
        """The name of the op, as in `OpCall.op`."""
        return name_of(self.overload)

    def run(self, tensors: Tensors | None = None) -> Tensors:
        """Return the results for `tensors`, by default the call's own."""
        given = self.tensors if tensors is None else tensors
        args, kwargs = [], {}
        for parameter in self.overload._schema.arguments:
            value = _fill(self.arguments[parameter.name], given)
            if parameter.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        results = self.overload(*args, **kwargs)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def local(self, rule: Rule, tensors: Tensors, parts: Parts) -> Tensors:
        """Return the results of one rank from its shards of the operands."""
        return self.run(tensors)

    @cached_property
    def results(self) -> Tensors:
        """The results for the full tensors."""
        return self.run([t.clone() for t in self.tensors])

    @cached_property
    def call(self) -> OpCall:
        """The call as rules see it."""
        return OpCall(
            op=self.op,
            arguments=self.arguments,
            operands=tuple(tuple(t.shape) for t in self.tensors),
            results=tuple(tuple(t.shape) for t in self.results),
            operand_dtypes=tuple(t.dtype for t in self.tensors),
            result_dtypes=tuple(t.dtype for t in self.results),
        )


def _fill(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, Operand):
        return tensors[value.index]
    return [_fill(v, tensors) for v in value] if isinstance(value, list) else value


def arguments_of(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type
) -> tuple[dict[str, Any], list[Any]]:
    """Return the arguments by schema name with an `Operand` for each value of type `kind`.

    The second result has these values in order.
    """
    found: list[Any] = []

    def swap(value: Any) -> Any:
        if isinstance(value, kind):
            found.append(value)
            return Operand(len(found) - 1)
        return [swap(v) for v in value] if isinstance(value, (list, tuple)) else value

    arguments: dict[str, Any] = {}
    for i, parameter in enumerate(overload._schema.arguments):
        if i < len(args):
            arguments[parameter.name] = swap(args[i])
        elif parameter.name in kwargs:
            arguments[parameter.name] = swap(kwargs[parameter.name])
        else:
            arguments[parameter.name] = parameter.default_value
    return arguments, found
