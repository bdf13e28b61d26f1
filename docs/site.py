"""What the site has beside `docs/`: pages of the root, what commands say, what `nav` forgot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_config(config: Any) -> None:
    """Pages that `nav` does not name stand at its end, so that a new one is never lost."""
    named = set(_leaves(config.nav))
    pages = [page.relative_to(ROOT / "docs") for page in sorted((ROOT / "docs").rglob("*.md"))]
    config.nav += [str(page) for page in pages if str(page) not in named]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    for name in FROM_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between the root and `docs/`, which are one folder here; and what is made."""
    if page.file.src_uri == "commands.md":
        markdown += "".join(helps())
    # GitHub wants a bar within a cell of a table to be escaped, in code too; here it is not one.
    markdown = re.sub(r"^\|.*$", lambda row: row[0].replace("\\|", "|"), markdown, flags=re.M)
    if page.file.src_uri in FROM_ROOT:
        return markdown.replace("](docs/", "](")
    return re.sub(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(FROM_ROOT)}))", r"](\1", markdown)


def helps() -> Iterator[str]:
    """A section for each command, with its `--help`."""
    from shardwright.planner.cli.main import main

    above = click.Context(main, info_name="shardwright")
    for name, command in main.commands.items():
        context = click.Context(command, above, info_name=name, terminal_width=84)
        yield f"\n## shardwright {name}\n\n```text\n{command.get_help(context)}\n```\n"


def _leaves(nav: Any) -> list[str]:
    """All pages in a navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]
