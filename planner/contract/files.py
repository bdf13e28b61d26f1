"""Reads JSON within limits of size and depth, and writes files atomically."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

DEEPEST = 64
"""Most levels of nested lists and objects."""
LONGEST_INTEGER = 100
"""Most digits of a number."""
LONGEST_NAME = 1000
"""Most characters of a key."""
MAX_BYTES = 1 << 28
"""Most bytes of a file: many times what the header of 100,000 tensors takes."""
LARGEST_PLAN = 1 << 26
"""Most bytes of a plan that is read; plans of the largest models have a hundredth of that."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file next to `path`, then rename it into place.

    A link stays a link. A path that is not a regular file (/dev/stdout) is written to directly.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name[:100]}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Return the content of the JSON file at `path`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or exceeds a limit; the message is one line.
    """
    return parse_json(read_bytes(path, MAX_BYTES))


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of `most` bytes at most.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has more bytes, or `path` is no name; the message is one line.
    """
    with path.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def parse_json(content: str | bytes, plain: bool = False, unique: bool = False) -> Any:
    """Parse JSON text.

    Args:
        content: The text.
        plain: Whether to refuse unprintable text, and NaN and Infinity, which configs contain.
        unique: Whether to refuse an object with a repeated key.

    Raises:
        ValueError: it is not JSON, or exceeds a limit; the message is one line.
    """
    rest: dict[str, Any] = {"parse_constant": _no_constant} if plain else {}
    if unique:
        rest["object_pairs_hook"] = _without_repeats
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


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has '{twice[:40]}' twice")
    return out


def _check(value: Any, plain: bool) -> None:
    """Refuse values that are nested too deep, long names, and text that is not valid Unicode."""
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
        raise ValueError(f"it has text that is no Unicode: {text[:40]!a}") from None
