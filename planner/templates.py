"""Fills in templates of text files; those of pages are in `picture/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def rendered(folder: Path, name: str, /, **values: Any) -> str:
    """Return what the template of the file `name` becomes with these values."""
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals |= {"sorted": sorted, "str": str}
    return environment.get_template(f"{name}.jinja").render(**values)
