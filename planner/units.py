"""Parses and formats bytes and times."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ByteSize, TypeAdapter, ValidationError


def parse_bytes(text: str) -> int:
    """Parse `24GiB`, `24 GB`, `1.5TiB`, `500MB` or plain bytes into a number of bytes.

    Raises:
        ValueError: the text is not a positive size.
    """
    try:
        given = int(text) if text.isdecimal() else text  # exact, however large
        size = TypeAdapter(ByteSize).validate_python(given)
    except ValidationError:
        size = 0
    if not 0 < size < 2**63:
        raise ValueError(
            f"'{text:.60}' is not a size: write it as 24GiB, 24GB, 500MB or plain bytes"
        )
    return int(size)


def human_bytes(size: int) -> str:
    """Format `size` in the largest binary unit that leaves at least 1: `13.4 GiB`."""
    return _in_words(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def human_time(nanoseconds: int) -> str:
    """Format `nanoseconds` in the largest unit that leaves at least 1: `48.4 us`."""
    return _in_words(nanoseconds, 1000, ("ns", "us", "ms", "s"))


def _in_words(number: int, step: int, units: Sequence[str]) -> str:
    """Format a number in the largest unit that leaves at least 1; each is `step` of the one before.

    A number of the smallest unit is written without decimals.
    """
    value, at = float(number), 0
    while round(value, 1) >= step and at < len(units) - 1:
        value, at = value / step, at + 1
    return f"{value:.1f} {units[at]}" if at else f"{number} {units[0]}"
