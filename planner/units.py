"""Parses and formats bytes and times."""

from __future__ import annotations

import re

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Parse `24GiB`, `24 GB`, `1.5TiB`, `500MB` or plain bytes into a number of bytes.

    Raises:
        ValueError: the text is not a positive size.
    """
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if found and unit and "." in found[1] else None
    if found and unit and size is None:
        size = int(found[1]) * unit
    if not size:
        raise ValueError(
            f"'{text:.60}' is not a size: write it as 24GiB, 24GB, 500MB or plain bytes"
        )
    return size


def human_bytes(size: int) -> str:
    """Format `size` in the largest binary unit that leaves at least 1: `13.4 GiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def human_time(nanoseconds: int) -> str:
    """Format `nanoseconds` in the largest unit that leaves at least 1: `48.4 us`."""
    value, unit = float(nanoseconds), "ns"
    for larger in ("us", "ms", "s"):
        if round(value, 1) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nanoseconds} ns" if unit == "ns" else f"{value:.1f} {unit}"
