"""Counts lines of code by folder: neither comments, docstrings nor blank lines.

    python -m benchmarks.size

docs/size.md says what each folder is for and who needs it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict

from rich.console import Console
from rich.table import Table

from benchmarks.reached import PARTS, ROOT

SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """The number of lines of a Python file with code on them."""
    texts = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr))
    docs = (t for t in texts if isinstance(t, ast.Constant) and isinstance(t.value, str))
    said = {n for doc in docs for n in range(doc.lineno, (doc.end_lineno or 0) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (t for t in tokens if t.type not in SILENT)
    return len({n for t in code for n in range(t.start[0], t.end[0] + 1)} - said)


def main() -> None:
    """Print a table."""
    files, code = defaultdict[str, int](int), defaultdict[str, int](int)
    for part in PARTS:
        for file in (ROOT / part).rglob("*.py"):
            folder = str(file.parent.relative_to(ROOT))
            files[folder] += 1
            code[folder] += lines_of_code(file.read_text())
    table = Table("folder", "files", "lines of code")
    for folder in sorted(code):
        table.add_row(folder, str(files[folder]), f"{code[folder]:,}")
    table.add_section()
    table.add_row("all", f"{sum(files.values()):,}", f"{sum(code.values()):,}")
    Console().print(table)


if __name__ == "__main__":
    main()
