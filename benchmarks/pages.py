"""Reads fenced blocks of Markdown pages: the files they make, and the commands they run.

A `python` block is run, and the blocks of a page share their names. With a title, it is a file of
that name, which commands of the page may run. `bash` has one command per line. `console` has
commands after `$` with their output below, where `...` stands for anything. A block whose title
begins with "not run here: " says why.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED = "not run here: "


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        kind: Its language.
        title: Its title on the site; empty if it has none.
        text: Its content.
        line: The line of the page on which the content begins.
    """

    kind: str
    title: str
    text: str
    line: int

    @property
    def skipped(self) -> bool:
        """Return whether it says that it is not run."""
        return self.title.startswith(SKIPPED)


def blocks(page: Path) -> Iterator[Block]:
    """Yield all blocks of a page, in order."""
    text = page.read_text()
    fence = r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$'
    for found in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(found[1], found[2] or "", found[3], line)


def commands(block: Block) -> Iterator[tuple[str, str | None]]:
    """Yield each command of a block, and its output if the page shows it."""
    if block.kind == "console":
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed
    if block.kind == "bash":
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip():
                yield re.sub(r"\s+#.*", "", line), None


def unlike(wanted: str | None, found: str) -> str:
    """Return where a command's output differs from the page; empty if it does not."""
    if wanted is None:
        return ""
    check, example = doctest.OutputChecker(), doctest.Example("", wanted)
    if check.check_output(example.want, found, doctest.ELLIPSIS):
        return ""
    return check.output_difference(example, found, doctest.ELLIPSIS)
