"""Tables put into the classes of transformers that have them, as a diff of its sources."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwright.planner.exports.stock.styles import Table

GENERATED = "This file was automatically generated from"
"""In the first lines of files that transformers makes of a `modular_*.py`."""

Change = tuple[type, str, Table]
"""An attribute of a class, and the table that it is to be."""


def patch(changes: list[Change], notes: Mapping[str, str]) -> str:
    """A diff, from the root of transformers' repository.

    Args:
        changes: What to set. A class that has the attribute gets another one.
        notes: Key of a table -> a comment on its line.
    """
    texts: dict[Path, str] = {}
    for cls, attribute, table in changes:
        if table:
            for path in _files(cls):
                text = texts.get(path) or path.read_text()
                texts[path] = _with_attribute(text, cls.__name__, attribute, table, notes)
    return "".join(_diff(path, text) for path, text in sorted(texts.items()))


def _files(cls: type) -> Iterator[Path]:
    """The file that a class is in, and that which it was generated from, if it is there, too."""
    path = Path(inspect.getfile(cls))
    yield path
    head = path.read_text()[:1000]
    if GENERATED in head:
        modular = path.parent / Path(head.partition(GENERATED)[2].split()[0].rstrip(".")).name
        if modular.exists() and _class(modular.read_text(), cls.__name__):
            yield modular


def _class(text: str, name: str) -> ast.ClassDef | None:
    found = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return next(found, None)


def _with_attribute(
    text: str, cls: str, attribute: str, table: Table, notes: Mapping[str, str]
) -> str:
    node = _class(text, cls)
    assert node is not None
    start, end = _place(node, attribute)
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:start], _assignment(attribute, table, notes), *lines[end:]])


def _assignment(attribute: str, table: Table, notes: Mapping[str, str]) -> str:
    items = [f'"{key}": "{style}"' for key, style in table.items()]
    if len(items) == 1:
        return f"    {attribute} = {{{items[0]}}}\n"
    behind = (f",  # {notes[key]}" if key in notes else "," for key in table)
    rows = (f"        {item}{end}\n" for item, end in zip(items, behind, strict=True))
    return "".join([f"    {attribute} = {{\n", *rows, "    }\n"])


def _place(node: ast.ClassDef, attribute: str) -> tuple[int, int]:
    """Where the attribute is in a class, or behind what its first assignments are."""
    body = node.body
    for item in body:
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == attribute:
            return item.lineno - 1, item.end_lineno or item.lineno
    at = 1 if isinstance(body[0], ast.Expr) else 0  # behind the docstring
    while at < len(body) and isinstance(body[at], ast.Assign):
        at += 1
    line = (body[at - 1].end_lineno or 0) if at else body[0].lineno - 1
    return line, line


def _diff(path: Path, text: str) -> str:
    parts = path.parts
    name = "/".join(("src", *parts[len(parts) - 1 - parts[::-1].index("transformers") :]))
    before, after = (t.splitlines(keepends=True) for t in (path.read_text(), text))
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
