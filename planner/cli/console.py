"""How the command line talks: errors of one line, sizes, hints on stderr, a spinner."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from shardwright.errors import ShardwrightError


class Commands(click.Group):
    """A group that prints an error of ours, or of the machine, as one line.

    Its commands are listed in the order in which they were added.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return [*self.commands]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; unknown exceptions keep their traceback."""
        _prepare_streams()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # what cannot be written is said here, not at exit
        except ShardwrightError as error:
            say(f"Error: {error}")
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            raise  # whoever read has read enough
        except OSError as error:
            _drop_output()
            where = f" {error.filename}" if error.filename is not None else ""
            say(f"Error: cannot read or write{where}: {error.strerror or error}")
            ctx.exit(1)
        return result


def _prepare_streams() -> None:
    """What is closed leads nowhere, so that no other file takes its place; any text can be said."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 for good
        with suppress(AttributeError, ValueError):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Leave what could not be written, which Python would try to write again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Count(click.ParamType):
    """How many, from `least` on. The largest that can be meant is no news in a list of options."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self.range = click.IntRange(least, 2**40)

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number that `value` is."""
        return self.range.convert(value, param, ctx)


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
    """Print a hint, warning or error: one line to stderr, so that stdout holds results alone.

    What others wrote may be in it: nothing of that steers a terminal.
    """
    line = " ".join(text.split())
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in line), err=True)


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
