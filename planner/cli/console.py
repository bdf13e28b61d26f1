"""How the command line talks: errors of one line, sizes, hints on stderr, a spinner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from shardwright.errors import ShardwrightError


class Commands(click.Group):
    """A group that prints an error of ours as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; unknown exceptions keep their traceback."""
        try:
            return super().invoke(ctx)
        except ShardwrightError as error:
            say(f"Error: {' '.join(str(error).split())}")
            ctx.exit(error.exit_code)


class Size(click.ParamType):
    """Bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that `value` stands for."""
        from shardwright.planner.units import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def say(text: str) -> None:
    """Print a hint, warning or error: to stderr, so that stdout holds results alone."""
    click.echo(text, err=True)


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on stderr if that is a terminal; no chatter from libraries meanwhile."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with _quiet():
            yield
        return
    with console.status(text), _quiet():
        yield


def _quiet() -> Any:
    from shardwright.planner.quiet import quiet

    return quiet()


def compact(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
