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
    """A group that prints errors of ours, of the command line and of the machine as one line.

    Its commands are listed in the order in which they were added.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return [*self.commands]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; what --help and --version print goes out here."""
        _prepare_streams()
        with _errors_in_a_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; unknown exceptions keep their traceback."""
        with _errors_in_a_line(ctx):
            result = super().invoke(ctx)
            sys.stdout.flush()  # a failing write is reported here, not at exit
            return result


@contextmanager
def _errors_in_a_line(ctx: click.Context) -> Iterator[None]:
    """Print errors of ours, of the command line and of the machine as one line; end the command."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        where = (error.ctx or ctx).command_path
        say(f"Error: {error.format_message().rstrip('.')} (see '{where} --help')")
        ctx.exit(error.exit_code)
    except ShardwrightError as error:
        say(f"Error: {as_options(str(error))}")
        ctx.exit(error.exit_code)
    except BrokenPipeError:
        raise  # the reader has closed the pipe
    except OSError as error:
        _drop(sys.stdout)
        where = f" {error.filename}" if error.filename is not None else ""
        say(f"Error: cannot read or write{where}: {error.strerror or error}")
        ctx.exit(1)


OPTIONS = {
    "give example args or kwargs": "give example inputs with --inputs FILE.py:FUNCTION",
    "give inputs with which": "with --inputs FILE.py:FUNCTION give inputs with which",
    "give example inputs with": "with --inputs FILE.py:FUNCTION give example inputs with",
    "plan with example inputs (kwargs)": "plan with example inputs (--inputs FILE.py:FUNCTION)",
}
"""Advice of errors in terms of the Python API -> the same with an option."""


def as_options(text: str) -> str:
    """An error message with options of the command line in place of arguments of Python."""
    for advice, with_option in OPTIONS.items():
        text = text.replace(advice, with_option) if "--inputs" not in text else text
    return text


def _prepare_streams() -> None:
    """Open closed streams as /dev/null, so that no file gets their numbers; print any text."""
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


def _drop(stream: Any) -> None:
    """Drop what could not be written, and what follows: Python would try again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Count(click.ParamType):
    """A number from `least` on, without an upper limit in the help."""

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


class ByRank(click.ParamType):
    """A value, or several with commas between them: one for each rank.

    Args:
        each: The type of a value.
    """

    def __init__(self, each: click.ParamType) -> None:
        self.each, self.name = each, each.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or a tuple of them."""
        if not isinstance(value, str):
            return value
        found = tuple(self.each.convert(text.strip(), param, ctx) for text in value.split(","))
        return found[0] if len(found) == 1 else found


def say(text: str) -> None:
    """Print a hint, warning or error as one line on stderr: stdout holds results only.

    Characters that would control a terminal are escaped. Results do not fail with stderr.
    """
    line = " ".join(text.split())
    try:
        click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in line), err=True)
    except OSError:
        _drop(sys.stderr)


STAGES = {
    "read": "reading the model",
    "trace": "tracing its code",
    "axes": "finding axes",
    "problem": "posing the problem",
    "solve": "solving",
    "check": "checking each op",
    "emit": "writing the plan down",
    "verify": "running the plan on meta",
}
"""Stage of planning -> what a terminal shows."""


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on stderr if that is a terminal, with the stage that planning is at.

    Libraries are kept quiet meanwhile.
    """
    from rich.console import Console

    from shardwright.planner.quiet import quiet
    from shardwright.planner.stages import watch

    console = Console(stderr=True)
    if not console.is_terminal:
        with quiet():
            yield
        return
    with console.status(text) as spinner, quiet():

        def told(name: str) -> None:
            spinner.update(f"{text}: {STAGES.get(name, name)}")

        with watch(told=told):
            yield


def compact(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
