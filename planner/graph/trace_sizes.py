"""Sizes with which models are traced. They are primes, so that nothing divides them by accident."""

from collections.abc import Iterable

TRACE_BATCH, TRACE_SEQ = 3, 19

TRACE_SOURCE = 23
"""Length of a sequence that another model encoded."""

TRACE_REQUESTS = 7
"""Number of requests in a row of tokens."""

TRACE_STEP = 5
"""Number of new tokens after a cache, if it is not 1."""

TRACE_ROWS = 1009
"""Number of rows that data selects of the tokens."""


def has_rows(sizes: Iterable[int]) -> bool:
    """Return whether one of these sizes is a number of rows that data selects."""
    return any(n and n % TRACE_ROWS == 0 for n in sizes)
