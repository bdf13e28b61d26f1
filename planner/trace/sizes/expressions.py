"""Expressions that sizes were computed from, as nested tuples: see `SizeArgument` of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ, TRACE_SOURCE

if TYPE_CHECKING:
    from shardwright.planner.trace.sizes.callers import Caller

Expression = tuple[Any, ...]

RUN_TIME = {k * n for k in (1, TRACE_BATCH) for n in (1, TRACE_SEQ, TRACE_SOURCE)}
"""Sizes of the trace that come from the batch and its sequences only."""


class SizeFact(NamedTuple):
    """A size of a tensor: its expression, its dim, and the bound of a slice that it is, if any.

    `place` is its position among the sizes passed to the call that `caller` made.
    """

    expression: Expression
    dim: int
    bound: str = ""
    place: int = -1
    caller: Caller | None = None


def evaluate(
    expression: Expression,
    attributes: Mapping[tuple[str, str], int],
    reads: Mapping[tuple[int, int], int] | None = None,
) -> int:
    """Return the value of `expression` for these values of attributes (module, name) and reads.

    Attributes and reads without a value have the value of the trace.
    """
    head, *rest = expression
    if head == "constant":
        return int(rest[0])
    if head == "read":
        return (reads or {}).get((rest[1], rest[2]), int(rest[0]))
    if head == "attribute":
        return attributes.get((rest[0], rest[1]), rest[2])
    left, right = (evaluate(tuple(e), attributes, reads) for e in rest)
    if head == "+":
        return left + right
    if head == "-":
        return left - right
    if head == "*":
        return left * right
    if not right:
        return 0
    return left % right if head == "%" else left // right


def attributes_of(expression: Expression) -> set[tuple[str, str]]:
    """Return the attributes (module, name) in `expression`."""
    return {(leaf[1], leaf[2]) for leaf in _leaves(expression) if leaf[0] == "attribute"}


def reads_of(expression: Expression) -> set[tuple[int, int]]:
    """Return the reads (number of the tensor, dim) in `expression`."""
    return {(leaf[2], leaf[3]) for leaf in _leaves(expression) if leaf[0] == "read"}


def is_mixed(expression: Expression) -> bool:
    """Return whether `expression` mixes a run-time size and a size of the model.

    Its local value may then be on the same side of a bound as the unsharded value in the trace, but
    on the other side in a call with other sizes.
    """
    leaves = {leaf for leaf in _leaves(expression) if leaf[0] != "constant"}
    read = {leaf[1] for leaf in leaves if leaf[0] == "read"}
    sizes = read | {leaf[3] for leaf in leaves if leaf[0] == "attribute"}
    varies = any(n == TRACE_BATCH or not n % TRACE_SEQ or not n % TRACE_SOURCE for n in read)
    return varies and any(n > 1 and n not in RUN_TIME for n in sizes)


def is_product(expression: Expression) -> bool:
    """Return whether `expression` is a product, whose local value is 0 only if the full value is.

    The converse holds too.
    """
    if expression[0] == "*":
        return all(is_product(tuple(factor)) for factor in expression[1:])
    return expression[0] in ("constant", "attribute", "read")


def _leaves(expression: Expression) -> Iterator[Expression]:
    """Yield the constants, attributes and reads in `expression`."""
    if expression[0] in ("constant", "attribute", "read"):
        yield expression
    else:
        for part in expression[1:]:
            yield from _leaves(tuple(part))
