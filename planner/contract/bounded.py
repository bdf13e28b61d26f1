"""JSON from others, read in bounded time and memory: what is too long or too deep is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEEPEST = 64
"""Levels of lists and objects in one another."""
LONGEST_INTEGER = 100
"""Digits of a number."""
LONGEST_NAME = 1000
"""Characters of a key."""
MOST = 1 << 28
"""Bytes of a file: what 100,000 tensors take in a header, many times."""


def read_json(path: Path, most: int = MOST) -> Any:
    """What the JSON file at `path` holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no JSON, or more than is read; the message is one line.
    """
    with path.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return parse_json(content)


def parse_json(content: str | bytes, plain: bool = False) -> Any:
    """The value that JSON text stands for.

    Args:
        content: The text.
        plain: Whether NaN and Infinity, which configs have, and text that cannot be printed are
            refused, too.

    Raises:
        ValueError: it is no JSON, or nested deeper, or with longer names and numbers, than is read.
    """
    rest: dict[str, Any] = {"parse_constant": _no_constant} if plain else {}
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, parse_int=_integer, **rest)
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    _check(value, plain)
    return value


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number in JSON")


def _check(value: Any, plain: bool) -> None:
    """Refuse what is nested too deep, has too long a name, or text that cannot be written."""
    level = [value]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    _check_text(key, plain, LONGEST_NAME)
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                _check_text(item, plain)
        if not below:
            return
        level = below
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def _check_text(text: str, plain: bool, longest: int | None = None) -> None:
    if longest is not None and len(text) > longest:
        raise ValueError(f"it has a name of {len(text):,} characters: '{text[:40]}...'")
    if plain and not text.isprintable():
        raise ValueError(f"it has text that cannot be printed: {text[:40]!a}")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"it has text that is none: {text[:40]!a}") from None
