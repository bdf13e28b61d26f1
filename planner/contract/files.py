"""Files that are written all or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file beside `path`, then rename it into place.

    A link stays one, and what is no file but can be written to (/dev/stdout) is written to.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
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
