"""Sizes with which models are traced: primes, so that nothing splits them by accident."""

from collections.abc import Iterable

TRACE_BATCH, TRACE_SEQ = 3, 19

TRACE_SOURCE = 23
"""The length of a sequence that another model encoded."""

TRACE_STEP = 5
"""How many tokens go on behind a cache, where it is not one."""

TRACE_ROWS = 1009
"""How many rows data selects of tokens."""


def has_rows(sizes: Iterable[int]) -> bool:
    """Whether one of these sizes is a number of rows that data selects."""
    return any(n and n % TRACE_ROWS == 0 for n in sizes)
